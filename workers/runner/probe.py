"""What a model is to the runner, and a proof at load that one works over a paged cache; it warms up, too."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from workers.engine.plan import Chunk, StepPlan
from workers.engine.state import StateSpec
from workers.errors import ModelRefused
from workers.model.arch import DecoderSpec
from workers.model.paged_attention import StepFacts
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache, plan_layout

POOL = 8
"""Blocks per state group of the cache that a proof runs over."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Share of the largest logit by which two orders of the same sums may differ."""


class Model(Protocol):
    """What computes logits; `model/fallback.py` is one."""

    spec: DecoderSpec
    dtype: torch.dtype

    def state(self, dtype: Dtype) -> Sequence[StateSpec]:
        """What each layer keeps of a token in a cache of `dtype`."""
        ...

    def forward(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
        """Logits `[R, vocab]` float32 of the asked rows; K and V of all tokens written, `facts.on_layer` called per
        layer."""
        ...


def prove_model(model: Model, device: torch.device | str = "cpu") -> None:
    """Raise `ModelRefused` unless nine tokens in one run give the logits that they give in pieces beside another
    request.

    That proves that each layer asks our attention exactly once, in order, and that positions are the given ones: a
    class that counts them itself would answer nonsense without an error.
    """
    spec = model.spec
    layout = plan_layout(spec, model.state("fp32"), 4, "fp32")
    num_groups = len(layout.layer_groups)
    cache = PagedKVCache(layout, POOL * num_groups, device)
    first, second, other = (_tables(blocks, num_groups) for blocks in ((6, 2, 5), (3, 0, 1), (7, 4)))
    tokens = tuple(range(103, 112))  # ordinary ones: what a model never saw is noise, which rounding makes large
    whole = _run(model, cache, [_chunk(1, tokens, 0, first)])
    _run(model, cache, [_chunk(2, (4, 9, 7), 0, other), _chunk(1, tokens[:6], 0, second)])
    apart = _run(model, cache, [_chunk(2, (8,), 3, other), _chunk(1, tokens[6:], 6, second)])
    if not bool((whole - apart).abs().max() <= TOLERANCE[model.dtype] * whole.abs().max()):
        raise ModelRefused(f"{spec.architecture} answers differently in a batch over a paged cache than alone")


def _tables(blocks: tuple[int, ...], num_groups: int) -> tuple[tuple[int, ...], ...]:
    """Other blocks for each group."""
    return tuple(tuple(POOL * group + block for block in blocks) for group in range(num_groups))


def _chunk(name: int, tokens: tuple[int, ...], first: int, tables: tuple[tuple[int, ...], ...]) -> Chunk:
    return Chunk(StreamKey(bytes([name]) * 16, 0), tokens, first, tables, SamplingParams(), 0, False, True)


def _run(model: Model, cache: PagedKVCache, chunks: list[Chunk]) -> Tensor:
    """Logits `[vocab]` after the last chunk."""
    spec = model.spec
    seen: list[int] = []
    batch = make_batch(StepPlan(tuple(chunks)), cache, seen.append)
    try:
        logits_RV = model.forward(batch.ids_T % spec.vocab_size, batch.positions_T, batch.rows_R, batch.facts)
    except (TypeError, RuntimeError, AttributeError, IndexError, ValueError) as error:
        raise ModelRefused(f"{spec.architecture} does not run over a paged cache: {error}") from error
    if seen != list(range(spec.num_layers)):
        raise ModelRefused(f"{spec.architecture} does not ask attention once per layer: {seen} of {spec.num_layers}")
    return logits_RV[-1]
