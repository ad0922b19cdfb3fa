"""One text through a decoder over the native backend in different company: whole, in pieces, beside others."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from workers.engine.plan import Chunk, StepPlan
from workers.errors import BackendUnavailable
from workers.model.build import WeightMode, load_decoder
from workers.model.decoder import Decoder
from workers.ops.native import Level, NativeOps
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache, plan_layout

BLOCK_TOKENS = 32
Part = tuple[int, Sequence[int], int]
"""(request, tokens, position of the first of them)."""


def load_native(folder: Path, mode: WeightMode, num_threads: int, level: Level | None = None) -> Decoder:
    """Skips the test where the backend or the level cannot run."""
    try:
        return load_decoder(folder, mode, NativeOps(num_threads, level))
    except BackendUnavailable as error:
        pytest.skip(str(error))


class Texts:
    """Requests over one paged cache; their blocks are interleaved, so that no two of one request are neighbours."""

    def __init__(self, decoder: Decoder, dtype: Dtype, num_requests: int, context: int) -> None:
        layout = plan_layout(decoder.spec, decoder.state(dtype), BLOCK_TOKENS, dtype)
        step = num_requests * len(layout.layer_groups)
        blocks = -(-context // BLOCK_TOKENS) * step
        self._decoder = decoder
        self._cache = PagedKVCache(layout, blocks)
        self._cache.data.fill_(torch.nan)
        self._tables = [
            tuple(tuple(range(g, blocks, step)) for g in range(n, step, num_requests)) for n in range(num_requests)
        ]

    def step(self, parts: Sequence[Part]) -> Tensor:
        """Logits `[tokens of all parts, vocab]`."""
        chunks = tuple(
            Chunk(
                StreamKey(bytes([n]) * 16, 0), tuple(tokens), first, self._tables[n], SamplingParams(), 0, False, True
            )
            for n, tokens, first in parts
        )
        batch = make_batch(StepPlan(chunks), self._cache, lambda layer: None)
        return self._decoder.forward(batch.ids_T, batch.positions_T, torch.arange(len(batch.ids_T)), batch.facts)


def logits_whole(decoder: Decoder, dtype: Dtype, text: Sequence[int]) -> Tensor:
    return Texts(decoder, dtype, 1, len(text)).step([(0, text, 0)])


def logits_in_pieces(decoder: Decoder, dtype: Dtype, text: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """In chunks of these sizes, which add up to the text."""
    texts, parts, first = Texts(decoder, dtype, 1, len(text)), [], 0
    for size in sizes:
        parts.append(texts.step([(0, text[first : first + size], first)]))
        first += size
    assert first == len(text)
    return torch.cat(parts)


def logits_in_a_batch(decoder: Decoder, dtype: Dtype, text: Sequence[int], others: Sequence[Sequence[int]]) -> Tensor:
    """In two chunks beside three other requests, which stand before and after it in the batch."""
    assert len(others) == 3
    texts, half = Texts(decoder, dtype, 4, max(map(len, (text, *others)))), len(text) // 3
    texts.step([(1, others[0][:-1], 0), (3, others[2][:-5], 0)])
    first = texts.step([(2, others[1][:7], 0), (0, text[:half], 0)])[7:]
    before, after = others[0][-1:], others[2][-5:]
    parts: list[Part] = [
        (1, before, len(others[0]) - 1), (0, text[half:], half), (3, after, len(others[2]) - 5), (2, others[1][7:], 7)
    ]  # fmt: skip
    return torch.cat((first, texts.step(parts)[1 : 1 + len(text) - half]))
