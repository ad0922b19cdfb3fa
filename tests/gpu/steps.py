"""The steps of `make gpu-check`: each returns what it saw in one line, or raises. Run one by one, each in its process.

`DEVICE` is all that ties them to a GPU: a test runs those that need no CUDA library on the CPU, so that the first run
on a GPU does not meet code that has never run.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from kv_transfer.wire import KeyRing
from tests.support.decoder_runs import compute_logits
from tests.support.rank_process import spawn_rank
from tests.support.replay import replay
from tests.support.tiny_models import save_tiny
from workers.engine.config import EngineConfig
from workers.model.build import WeightMode, load_decoder
from workers.model.decoder import Decoder
from workers.ops.base import Ops
from workers.ops.cuda import CudaOps
from workers.ops.cuda_attention import find_fault
from workers.ops.reference import ReferenceOps
from workers.ops.select import select_ops
from workers.ops.weights import AttentionLayer
from workers.replica.rank_collectives import NCCL_ID_KEY
from workers.replica.tp_group import GroupConfig, GroupLeader, GroupRunner
from workers.runner.graphs import Capture, CudaCapture, DecodeGraphs
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.runner.model_runner import ModelRunner

DEVICE = "cuda"
FP32_ERROR = 2e-4
"""Of the largest logit: sums in another order, and the device's exp, cos and tanh."""
BF16_ERROR = 5e-2
"""Root mean square of the differences of logits, of their own spread; docs/models.md bounds the modes of the CPU so."""
NEW_TOKENS = 24
LENGTHS = (1, 7, 15, 16, 17, 40, 90, 130)
BLOCK_TOKENS = 16
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
HALVES = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
"""Sizes that kernels of other packages take; small weights, for a random model is chaotic."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma3": ("gemma3_text", {}),
    "mixtral": ("mixtral", {}),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED, "sliding_window": 16},
    ),
}


def make_ops(is_plain: bool = False) -> Ops:
    """The backend as serving chooses it; `is_plain`: gathered attention whatever is installed."""
    if is_plain or DEVICE == "cpu":
        return CudaOps(DEVICE)
    return select_ops("cuda", 1, BLOCK_TOKENS).ops


def show_versions() -> str:
    gpu = torch.cuda.get_device_properties(0)
    return (
        f"{gpu.name}, {gpu.total_memory / (1 << 30):.0f} GiB, sm_{gpu.major}{gpu.minor}; torch {torch.__version__},"
        f" CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; "
        + select_ops("cuda", 1, BLOCK_TOKENS).reason
    )


def check_ops() -> str:
    """The contract suite with its tensors moved over."""
    options = ("-q", "-p", "no:cacheprovider", "tests/contract/ops", "-k", "cuda and not cpu")
    command = (sys.executable, "-m", "pytest", *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = next((line for line in reversed(done.stdout.splitlines()) if " passed" in line or " failed" in line), "")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert done.returncode == 0, f"{last}; first: {failed[:1]}"
    assert "skipped" not in last, last
    return last.strip("= ")


def check_kernels() -> str:
    """Which kinds of layers the chosen kernel serves, and why not the others."""
    kernel = getattr(make_ops(), "_kernel", None)
    if kernel is None:
        return "none is installed that reads blocks of 16 tokens: everything is gathered"
    sizes = {"num_heads": 8, "num_kv_heads": 2, "scale": 0.1, "rope": None}
    kinds: dict[str, dict[str, Any]] = {
        "64": {"head_dim": 64}, "128": {"head_dim": 128}, "window": {"head_dim": 128, "window": 20},
        "soft-cap": {"head_dim": 128, "softcap": 20.0}, "96": {"head_dim": 96},
    }  # fmt: skip
    told = []
    for name, traits in kinds.items():
        fault = find_fault(kernel, AttentionLayer(**(sizes | traits)), BLOCK_TOKENS, torch.device(DEVICE))
        told.append(f"{name} {'agrees' if fault is None else f'gathered ({fault})'}")
    return f"{kernel.name}: {', '.join(told)}"


def on_models(check: Callable[[str, Path], str], **changes: Any) -> str:
    """The check's words on each tiny random model."""
    told = []
    for name, (kind, traits) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            save_tiny(kind, Path(folder), jitter=0.2, eos_token_id=None, **(traits | changes))
            told.append(f"{name} {check(name, Path(folder))}")
    return ", ".join(told)


def make_prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]


def run_tokens(
    decoder: Decoder, ops: Ops, kv: Dtype, capture: Capture | None = None, temperature: float = 0.0
) -> list[list[int]]:
    """Tokens of staggered requests through the engine; with `capture` decode steps are recorded."""
    context = 256
    layout = plan_layout(decoder.spec, decoder.state(kv), BLOCK_TOKENS, kv)
    cache = PagedKVCache(layout, 200 * len(layout.layer_groups), ops.device, has_scratch=True)
    graphs = None
    if capture is not None:
        assert isinstance(ops, CudaOps)
        graphs = DecodeGraphs(decoder, ops, cache, 16, context, capture)
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS, num_blocks=cache.num_blocks, chunk_tokens=64, max_running=16,
        max_context_tokens=context, windows=tuple(group.window for group in layout.layer_groups),
    )  # fmt: skip
    return replay(ModelRunner(decoder, cache, whole=graphs), config, make_prompts(), NEW_TOKENS, 2, temperature).tokens


def check_decoder_fp32() -> str:
    def check(name: str, folder: Path) -> str:
        reference, ops = ReferenceOps(), make_ops()
        expected, found = load_decoder(folder, "fp32", reference), load_decoder(folder, "fp32", ops)
        error = logit_error(found, expected, lambda difference, of: float(difference.abs().max() / of.abs().max()))
        assert error <= FP32_ERROR, f"{name}: logits differ by {error:.1e} of the largest, limit {FP32_ERROR:.0e}"
        assert run_tokens(found, ops, "fp32") == run_tokens(expected, reference, "fp32"), f"{name}: other tokens"
        return f"{error:.1e}"

    return f"{on_models(check)} of the largest logit, equal tokens"


def check_decoder_bf16() -> str:
    def check(name: str, folder: Path) -> str:
        expected = load_decoder(folder, "bf16", ReferenceOps())
        error = logit_error(
            load_decoder(folder, "bf16", make_ops()),
            expected,
            lambda difference, of: float(difference.std() / of.std()),
        )
        assert error <= BF16_ERROR, f"{name}: logits differ by {error:.1e} of their spread, limit {BF16_ERROR:.0e}"
        return f"{error:.1e}"

    return f"{on_models(check, initializer_range=0.06)} of the spread"


def logit_error(found: Decoder, expected: Decoder, measure: Callable[[Tensor, Tensor], float]) -> float:
    text = [3 + n * 7 % 200 for n in range(100)]
    expected_TV = compute_logits(expected, text)
    found_TV = compute_logits(found, text, device=DEVICE).cpu()
    return measure(found_TV - expected_TV, expected_TV)


def make_capture() -> Capture:
    return CudaCapture()


def _compare_recorded(mode: WeightMode, kv: Dtype, is_plain: bool) -> Callable[[str, Path], str]:
    def check(name: str, folder: Path) -> str:
        ops = make_ops(is_plain)
        decoder = load_decoder(folder, mode, ops)
        recorded = run_tokens(decoder, ops, kv, make_capture())
        eager = run_tokens(decoder, ops, kv)
        equal = sum(a == b for a, b in zip(recorded, eager, strict=True))
        assert equal == len(eager), f"{name}: {len(eager) - equal} of {len(eager)} streams differ"
        return f"{equal}/{len(eager)}"

    return check


def check_graphs_fp32() -> str:
    return f"equal streams: {on_models(_compare_recorded('fp32', 'fp32', is_plain=True))}"


def check_graphs_bf16() -> str:
    """A recorded step pads its batch, so cuBLAS may choose another kernel: over small weights that changes a bit of a
    logit, not a token.
    """
    check = _compare_recorded("bf16", "bf16", is_plain=False)
    return f"equal streams: {on_models(check, initializer_range=0.06, **HALVES)}"


def check_draws() -> str:
    def check(name: str, folder: Path) -> str:
        reference, ops = ReferenceOps(), make_ops()
        expected = run_tokens(load_decoder(folder, "fp32", reference), reference, "fp32", temperature=0.7)
        found = run_tokens(load_decoder(folder, "fp32", ops), ops, "fp32", temperature=0.7)
        equal = sum(a == b for a, b in zip(found, expected, strict=True))
        assert equal == len(expected), f"{name}: {len(expected) - equal} of {len(expected)} streams differ"
        return f"{equal}/{len(expected)}"

    return f"equal streams: {on_models(check)}"


def check_nccl_alone() -> str:
    """A communicator of one rank over a store of our own, which holds what a relay carries; a grouped send and receive
    on it; aborted by a thread.
    """
    c10d: Any = torch.distributed
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    free_before = torch.cuda.mem_get_info()[0]
    options = c10d.ProcessGroupNCCL.Options()
    options.config.max_ctas = 4
    started, store = time.perf_counter(), c10d.HashStore()
    group = c10d.ProcessGroupNCCL(store, 0, 1, options)
    group.eager_connect_single_device(device)
    assert store.check([NCCL_ID_KEY]), f"no id under {NCCL_ID_KEY!r}: a relay of the store would carry nothing"
    id_bytes = len(store.get(NCCL_ID_KEY))
    sent = torch.arange(1 << 20, dtype=torch.float32, device=device)
    received = torch.zeros_like(sent)
    group._group_start()
    group.send([sent], 0, 0)
    work = group.recv([received], 0, 0)
    group._group_end()
    work.wait()
    torch.cuda.synchronize()
    opened_s = time.perf_counter() - started
    assert torch.equal(sent, received), "what arrived is not what was sent"
    held_mib = (free_before - torch.cuda.mem_get_info()[0]) / (1 << 20)
    started = time.perf_counter()
    aborting = threading.Thread(target=group.abort)
    aborting.start()
    aborting.join(10)
    assert not aborting.is_alive(), "abort has not returned after 10 s"
    took_ms = (time.perf_counter() - started) * 1000
    return (
        f"id of {id_bytes} bytes, open and 4 MiB in {opened_s * 1000:.0f} ms, {held_mib:.0f} MiB held,"
        f" aborted in {took_ms:.0f} ms"
    )


def check_tensor_parallel() -> str:
    """Two ranks as processes against one, through the engine."""

    def check(name: str, folder: Path) -> str:
        secret = folder / "secret"
        KeyRing.write_new(secret)
        config = GroupConfig(
            folder=folder, mode="fp32", kv_dtype="fp32", block_tokens=BLOCK_TOKENS, num_blocks=400,
            max_context_tokens=256, backend="cuda" if DEVICE == "cuda" else "reference", num_threads=1, num_ranks=2,
            host="127.0.0.1", secret_path=secret,
        )  # fmt: skip
        leader = GroupLeader(config, lambda rank: None)
        process = spawn_rank(config, 1, leader.port)
        try:
            model = leader.start()
            runner = GroupRunner(leader, ModelRunner(model.decoder, model.cache))
            windows = tuple(group.window for group in model.cache.layout.layer_groups)
            engine = EngineConfig(
                block_tokens=BLOCK_TOKENS, num_blocks=400, chunk_tokens=64, max_running=16, max_context_tokens=256,
                windows=windows,
            )  # fmt: skip
            found = replay(runner, engine, make_prompts(), NEW_TOKENS, 2).tokens
        finally:
            leader.close()
            process.wait(20)
        ops = make_ops()
        assert found == run_tokens(load_decoder(folder, "fp32", ops), ops, "fp32"), f"{name}: other tokens"
        return "equal"

    return on_models(check)


LARGE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}  # fmt: skip
"""About 0.8 billion weights."""


def measure_decoder(changes: dict[str, Any] | None = None) -> str:
    """Of a random model: milliseconds of a prompt of 1,024 and of a decode step, and the bandwidth of the weights."""
    from tests.gpu.timing import time_steps

    with tempfile.TemporaryDirectory() as folder:
        save_tiny("llama", Path(folder), eos_token_id=None, **(LARGE | (changes or {})))
        ops = make_ops()
        decoder = load_decoder(Path(folder), "bf16", ops, max_positions=2048)
    times = time_steps(decoder, ops, make_capture(), torch.device(DEVICE))
    held = torch.cuda.max_memory_allocated() / (1 << 30) if DEVICE == "cuda" else 0.0
    weights = decoder.weights.num_bytes
    bandwidth = weights / times.recorded_ms[1] / 1e6
    shown = ", ".join(
        f"{rows} rows {times.eager_ms[rows]:.2f} eager {times.recorded_ms[rows]:.2f} recorded"
        for rows in times.eager_ms
    )
    return (
        f"{weights / (1 << 30):.2f} GiB of weights, {held:.2f} GiB at most; prompt of 1,024 {times.prompt_ms:.1f} ms;"
        f" decode in ms: {shown}; 1 row reads weights at {bandwidth:,.0f} GB/s"
    )
