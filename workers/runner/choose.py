"""Which code computes a model here, and why: our decoder over native kernels or plain torch, or the transformers
classes.

Chosen once at start. The decoder is preferred wherever `families.py` knows the model; what it does not know runs
through the transformers classes in fp32 or bf16.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kv_transfer.layout import Dtype, KeyOrder
from workers.errors import ModelRefused
from workers.model.arch import read_config
from workers.model.build import WeightMode, load_decoder
from workers.model.families import plan_decoder
from workers.model.progress import Progress, ignore_progress
from workers.ops.base import Ops
from workers.ops.cuda import CudaOps
from workers.ops.native import NativeOps, NativeStep
from workers.ops.select import BackendName, select_ops
from workers.runner.graphs import CudaCapture, DecodeGraphs
from workers.runner.kv_cache import Allocate, PagedKVCache, plan_layout
from workers.runner.model_runner import ModelRunner, load_runner
from workers.runner.plain import PlainSteps
from workers.runner.probe import prove_model

Backend = Literal["auto", "native", "reference", "cuda", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """What a runner is built from; every value is resolved."""

    folder: Path
    mode: WeightMode
    kv_dtype: Dtype
    block_tokens: int
    num_blocks: int
    max_context_tokens: int
    max_running: int
    backend: Backend
    num_threads: int
    allocate: Allocate | None = None
    """Where the memory of a cache on the CPU comes from; None: the process's own."""


@dataclass(frozen=True, slots=True)
class Chosen:
    runner: ModelRunner
    how: str
    """What computes and why, for the log."""


def choose_runner(settings: RunnerSettings, progress: Progress = ignore_progress) -> Chosen:
    """A runner whose model has been proven over a paged cache. Takes seconds.

    Raises `ModelRefused`, `ModelDamaged`, and `BackendUnavailable` for a named backend that does not run here.
    """
    why_not = _why_not_ours(settings)
    if why_not is None:
        return _load_ours(settings, progress)
    if settings.mode not in ("fp32", "bf16"):
        raise ModelRefused(f"dtype {settings.mode} needs our own decoder: {why_not}; use fp32 or bf16")
    sizes = (settings.block_tokens, settings.num_blocks)
    runner = load_runner(settings.folder, settings.mode, settings.kv_dtype, *sizes, progress, settings.allocate)
    return Chosen(runner, f"transformers classes: {why_not}")


def _why_not_ours(settings: RunnerSettings) -> str | None:
    if settings.backend == "transformers":
        return "asked for"
    try:
        plan_decoder(read_config(settings.folder))
    except ModelRefused as error:
        if settings.backend != "auto":
            raise
        return str(error)
    return None


def _load_ours(settings: RunnerSettings, progress: Progress) -> Chosen:
    assert settings.backend != "transformers"
    wanted: BackendName = settings.backend
    choice = select_ops(wanted, settings.num_threads, settings.block_tokens)
    ops: Ops = choice.ops
    model = load_decoder(settings.folder, settings.mode, ops, progress, settings.max_context_tokens)
    progress("warming up", 0.0)
    prove_model(model, ops.device)
    keys: KeyOrder = "dim_major" if ops.key_is_dim_major else "token_major"
    state = model.state(settings.kv_dtype)
    layout = plan_layout(model.spec, state, settings.block_tokens, settings.kv_dtype, keys)
    if ops.device.type != "cuda":
        cache = PagedKVCache(layout, settings.num_blocks, allocate=settings.allocate)
        if not isinstance(ops, NativeOps):
            return Chosen(ModelRunner(model, cache), choice.reason)
        step, is_one_group = model.step, len(layout.layer_groups) == 1
        whole = PlainSteps(step, cache) if isinstance(step, NativeStep) and is_one_group else None
        return Chosen(ModelRunner(model, cache, ops.draw, whole, ops.find_largest), choice.reason)
    assert isinstance(ops, CudaOps)
    cache = PagedKVCache(layout, settings.num_blocks, ops.device, has_scratch=True)
    graphs = DecodeGraphs(model, ops, cache, settings.max_running, settings.max_context_tokens, CudaCapture())
    return Chosen(ModelRunner(model, cache, whole=graphs), f"{choice.reason}; decode steps as CUDA graphs")
