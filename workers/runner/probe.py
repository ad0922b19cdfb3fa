"""What a model is to the runner, and a proof at load that one works over a paged cache; it warms up, too."""

from typing import Protocol

import torch
from torch import Tensor

from kv_transfer.layout import KVLayout
from workers.engine.plan import Chunk, StepPlan
from workers.errors import ModelRefused
from workers.model.arch import DecoderSpec
from workers.model.paged_attention import StepFacts
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Share of the largest logit by which two orders of the same sums may differ."""


class Model(Protocol):
    """What computes logits; `model/fallback.py` is one."""

    spec: DecoderSpec
    dtype: torch.dtype

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
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, 4, "fp32")
    cache = PagedKVCache(layout, 8, device)
    tokens = tuple(range(3, 12))
    whole = _run(model, cache, [_chunk(1, tokens, 0, (6, 2, 5))])
    _run(model, cache, [_chunk(2, (4, 9, 7), 0, (7, 4)), _chunk(1, tokens[:6], 0, (3, 0, 1))])
    apart = _run(model, cache, [_chunk(2, (8,), 3, (7, 4)), _chunk(1, tokens[6:], 6, (3, 0, 1))])
    if not bool((whole - apart).abs().max() <= TOLERANCE[model.dtype] * whole.abs().max()):
        raise ModelRefused(f"{spec.architecture} answers differently in a batch over a paged cache than alone")


def _chunk(name: int, tokens: tuple[int, ...], first: int, blocks: tuple[int, ...]) -> Chunk:
    return Chunk(StreamKey(bytes([name]) * 16, 0), tokens, first, blocks, SamplingParams(), 0, False, True)


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
