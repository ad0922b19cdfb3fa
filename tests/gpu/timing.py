"""Milliseconds of prompts and decode steps of a decoder, op by op and recorded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kv_transfer.layout import KVLayout
from workers.engine.plan import Chunk, StepPlan
from workers.model.decoder import Decoder
from workers.ops.base import Ops
from workers.ops.cuda import CudaOps
from workers.protocol import SamplingParams, StreamKey
from workers.runner.graphs import Capture, DecodeGraphs
from workers.runner.kv_cache import PagedKVCache
from workers.runner.model_runner import ModelRunner

BLOCK_TOKENS, CONTEXT = 16, 1024
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Times:
    prompt_ms: float
    eager_ms: dict[int, float]
    """By rows of the step."""
    recorded_ms: dict[int, float]


def time_steps(
    decoder: Decoder, ops: Ops, capture: Capture, device: torch.device, row_counts: Sequence[int] = (1, 16)
) -> Times:
    """Medians of ROUNDS steps whose requests have CONTEXT tokens; sampling included."""
    assert isinstance(ops, CudaOps)
    spec, blocks = decoder.spec, CONTEXT // BLOCK_TOKENS + 1
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK_TOKENS, "bf16")
    cache = PagedKVCache(layout, blocks * max(row_counts), device, has_scratch=True)
    graphs = DecodeGraphs(decoder, ops, cache, max(row_counts), CONTEXT + BLOCK_TOKENS, capture)
    eager, recorded = ModelRunner(decoder, cache), ModelRunner(decoder, cache, whole=graphs)

    def chunk(row: int, tokens: tuple[int, ...], first: int) -> Chunk:
        table = tuple(range(row * blocks, (row + 1) * blocks))
        key, is_prompt = StreamKey(bytes([row]) * 16, 0), len(tokens) > 1
        return Chunk(key, tokens, first, (table,), SamplingParams(), 0, False, is_prompt)

    prompt = StepPlan((chunk(0, tuple(n % spec.vocab_size for n in range(CONTEXT)), 0),))
    decode = {rows: StepPlan(tuple(chunk(n, (5,), CONTEXT) for n in range(rows))) for rows in row_counts}
    return Times(
        _median_ms(lambda: eager.execute(prompt, _ignore)),
        {rows: _median_ms(lambda plan=plan: eager.execute(plan, _ignore)) for rows, plan in decode.items()},
        {rows: _median_ms(lambda plan=plan: recorded.execute(plan, _ignore)) for rows, plan in decode.items()},
    )


def _median_ms(run: Callable[[], object]) -> float:
    """Each run ends with tokens on the host, so nothing is left on the device."""
    run()
    run()
    took = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        took.append((time.perf_counter() - started) * 1000)
    return sorted(took)[ROUNDS // 2]


def _ignore(layer: int) -> None:
    return
