"""The engine's `Runner`: batch, forward pass, sampling. No scheduling and no sampling policy."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from workers.engine.plan import RunResult, StepPlan
from workers.model.arch import DecoderSpec
from workers.model.fallback import load_fallback
from workers.model.loader import fingerprint_weights
from workers.model.progress import Progress, ignore_progress
from workers.ops.base import DrawRows, FindLargest
from workers.protocol import Logprobs
from workers.runner.batch import make_batch, make_draws
from workers.runner.kv_cache import TORCH_DTYPES, Allocate, PagedKVCache, plan_layout
from workers.runner.probe import Model, prove_model
from workers.sampling.adjust import is_adjusted
from workers.sampling.explain import explain_draw
from workers.sampling.logprobs import describe_token
from workers.sampling.sampler import Draw, find_largest, is_random, sample


class WholeSteps(Protocol):
    """What runs steps from the plan itself: recorded graphs, or a native step that takes plain numbers."""

    def run(self, plan: StepPlan, sampled: Sequence[int], on_layer: Callable[[int], None]) -> Tensor | None:
        """Logits `[len(sampled), V]` float32 of the chunks that are sampled, once the plan's K and V are in the cache
        and `on_layer` was called for each layer in order; None for a plan that it does not run.
        """
        ...


class ModelRunner:
    """One model over one paged cache. Owned by the engine thread."""

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        draw_rows: DrawRows | None = None,
        whole: WholeSteps | None = None,
        find: FindLargest = find_largest,
    ) -> None:
        """`draw_rows` and `find` are the backend's own ways of sampling, where it has them. `whole` runs the steps
        that it can; the model computes the others.
        """
        self.model, self._draw_rows, self._find, self._whole = model, draw_rows, find, whole
        self.cache = cache

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        """See `engine/plan.py`."""
        started = time.perf_counter_ns()
        sampled_chunks, draws = make_draws(plan)
        logits_RV = self._whole.run(plan, sampled_chunks, on_layer) if self._whole is not None else None
        if logits_RV is None:
            batch = make_batch(plan, self.cache, on_layer)
            logits_RV = self.model.forward(batch.ids_T, batch.positions_T, batch.rows_R, batch.facts)
        tokens: list[int | None] = [None] * len(plan.chunks)
        explains: list[dict[str, Any] | None] = [None] * len(plan.chunks)
        logprobs: dict[int, Logprobs] = {}
        sampled, logits_RV = self._sample(logits_RV, plan, draws)
        for row, (chunk, token) in enumerate(zip(sampled_chunks, sampled, strict=True)):
            tokens[chunk], num_top = token, draws[row].params.logprobs
            if num_top >= 0:
                logprobs[chunk] = describe_token(logits_RV[row], token, num_top)
            if plan.chunks[chunk].explain:
                explains[chunk] = explain_draw(logits_RV[row], draws[row], token)
        return RunResult(tokens, explains, (time.perf_counter_ns() - started) // 1000, logprobs)

    def _sample(self, logits_RV: Tensor, plan: StepPlan, draws: Sequence[Draw]) -> tuple[list[int], Tensor]:
        """The tokens, and the logits where they are looked at further."""
        if not draws:
            if logits_RV.is_cuda:
                torch.cuda.synchronize()  # the time of a step is what it took, not what it took to ask for it
            return [], logits_RV
        if logits_RV.is_cuda and (any(map(_is_drawn, draws)) or any(chunk.explain for chunk in plan.chunks)):
            logits_RV = logits_RV.cpu()  # anything but a maximum is many small steps over one row
        return sample(logits_RV, draws, self._draw_rows, self._find), logits_RV


def _is_drawn(draw: Draw) -> bool:
    """Whether more is asked of the row than its likeliest token."""
    params = draw.params
    return is_random(params) or is_adjusted(params, draw.position) or params.logprobs >= 0


def load_runner(
    folder: Path,
    dtype: Dtype,
    layout_dtype: Dtype,
    block_tokens: int,
    num_blocks: int,
    progress: Progress = ignore_progress,
    allocate: Allocate | None = None,
) -> ModelRunner:
    """The model of `folder` computing in `dtype` over a fresh cache of `num_blocks` blocks in `layout_dtype`.

    Raises `ModelRefused` and `ModelDamaged` as `load_fallback`. Takes 2-4 s for 135M parameters, most of it imports.
    """
    model = load_fallback(folder, TORCH_DTYPES[dtype], progress)
    progress("warming up", 0.0)
    prove_model(model)
    layout = plan_layout(model.spec, model.state(layout_dtype), block_tokens, layout_dtype)
    return ModelRunner(model, PagedKVCache(layout, num_blocks, allocate=allocate))


def digest_facts(folder: Path, spec: DecoderSpec, dtype: str) -> dict[str, str]:
    """What must be equal for two workers to share KV caches; for `kv_transfer.layout.make_model_digest`."""
    return {
        "weights": fingerprint_weights(folder),
        "spec": repr(spec),
        "quantization": dtype,
        "adapter": "none",
        "drafter": "none",
    }
