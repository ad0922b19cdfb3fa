"""What a one-sided sender writes is what a gather and a scatter would have written, whatever the caches look like."""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.copies import Part
from kv_transfer.direct import DirectWriter
from kv_transfer.errors import FrameInvalid
from kv_transfer.fence import WINDOW_BYTES, Copies, read_window
from kv_transfer.layout import NULL_BLOCK, KVLayout, LayerGroup
from kv_transfer.staging import TORCH_DTYPES, as_bytes, gather_unit, scatter_unit, view_cache

GENERATION = 5
PLAIN = (LayerGroup((0, 1, 2, 3)),)
GROUPED = (LayerGroup((0, 2, 3)), LayerGroup((1,), window=4))


class FakePair:
    """A pool of this process, written to without a fence: it counts what a window would hold."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.pool = cache.view(-1).view(torch.uint8)
        self.is_revoked = False
        self.windows: list[tuple[int, int]] = []

    def copy(self, generation: int, copies: Copies, source: torch.Tensor) -> bool:
        assert generation == GENERATION
        have, into = source.view(-1).view(torch.uint8).numpy(), self.pool.numpy()
        if self.is_revoked:
            return False
        for from_, to, size, inner, outer, from_in, to_in, from_out, to_out, window in copies.tolist():
            self.windows.append(tuple(read_window(window)))
            for o in range(outer):
                for i in range(inner):
                    at, there = from_ + o * from_out + i * from_in, to + o * to_out + i * to_in
                    assert 0 <= at <= at + size <= have.size
                    assert 0 <= there <= there + size <= into.size
                    into[there : there + size] = have[at : at + size]
        return True

    @contextlib.contextmanager
    def window(self, generation: int, window: int) -> Iterator[bool]:
        assert generation == GENERATION
        self.windows.append(tuple(read_window(window)))
        yield not self.is_revoked

    def poison(self) -> None: ...


def make_cache(layout: KVLayout, num_blocks: int, seed: int) -> torch.Tensor:
    shape = layout.cache_shape(num_blocks)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[layout.dtype])


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, KVLayout, list[list[int]], list[list[int]], Part]:
    """(source, target, their tables, part); windows let go of the same first pages at both ends."""
    groups = draw(st.sampled_from([PLAIN, GROUPED]))
    source_size = draw(st.integers(1, 6))
    target_size = source_size if groups is GROUPED else draw(st.integers(1, 6))
    dtypes, keys = st.sampled_from(["fp32", "bf16"]), st.sampled_from(["token_major", "dim_major"])
    source, target = (KVLayout(4, 2, 3, size, draw(dtypes), draw(keys), groups) for size in (source_size, target_size))
    if draw(st.booleans()):
        target = dataclasses.replace(target, dtype=source.dtype, keys=source.keys)
    num_tokens = draw(st.integers(1, 20))
    first = draw(st.integers(0, num_tokens - 1))
    first_layer = draw(st.integers(0, 3))
    part = Part(first, draw(st.integers(1, num_tokens - first)), first_layer, draw(st.integers(1, 4 - first_layer)))
    tables = []
    for layout in (source, target):
        pages = layout.num_blocks(num_tokens)
        blocks = draw(st.permutations(range(pages * len(groups))))
        tables.append([list(blocks[g * pages : (g + 1) * pages]) for g in range(len(groups))])
    if groups is GROUPED:
        gone = draw(st.integers(0, len(tables[0][1])))
        for table in (tables[0][1], tables[1][1]):
            table[:gone] = [NULL_BLOCK] * gone
    return source, target, tables[0], tables[1], part


@settings(max_examples=300)
@given(cases(), st.booleans())
def test_a_part_lies_where_a_scatter_would_have_put_it(case, is_staged):
    source, target, source_tables, target_tables, part = case
    num_blocks = max(block for table in target_tables for block in table) + 2
    have = make_cache(source, max(block for table in source_tables for block in table) + 2, 1)
    wanted, written = make_cache(target, num_blocks, 2), make_cache(target, num_blocks, 2)
    own = view_cache(have, source.keys, source.places)
    unit = gather_unit(own, source_tables, *part, dtype=TORCH_DTYPES[target.dtype])
    scatter_unit(
        view_cache(wanted, target.keys, target.places), target_tables, unit, part.first_token, part.first_layer
    )
    pair = FakePair(written)
    writer = DirectWriter(have, source, pair, target)
    if is_staged:
        assert writer.write_unit(GENERATION, as_bytes(unit), target_tables, part)
    else:
        assert writer.write_part(GENERATION, source_tables, target_tables, part)
    assert torch.equal(written, wanted)
    pages = range(
        part.first_token // target.block_tokens, -(-(part.first_token + part.num_tokens) // target.block_tokens)
    )
    groups = {target.places[layer][0] for layer in range(part.first_layer, part.first_layer + part.num_layers)}
    held = {(group, page) for group in groups for page in pages if target_tables[group][page] != NULL_BLOCK}
    assert set(pair.windows) == held, "a window names exactly what is written under it"


@pytest.mark.parametrize("keys", ["token_major", "dim_major"])
@pytest.mark.parametrize("target_dtype", ["fp32", "bf16"])
def test_nothing_is_written_once_revoked(keys, target_dtype):
    source, target = KVLayout(4, 2, 3, 4, "fp32", keys), KVLayout(4, 2, 3, 4, target_dtype)
    cache = make_cache(target, 4, 2)
    pair, before = FakePair(cache), cache.clone()
    pair.is_revoked = True
    writer = DirectWriter(make_cache(source, 4, 1), source, pair, target)
    assert not writer.write_part(GENERATION, [[0, 1]], [[2, 3]], Part(0, 8, 0, 4))
    assert torch.equal(cache, before)


def test_a_block_outside_the_pool_is_refused():
    layout = KVLayout(4, 2, 3, 4, "fp32")
    cache = make_cache(layout, 4, 2)
    writer = DirectWriter(make_cache(layout, 4, 1), layout, FakePair(cache), layout)
    for table in ([2, 4], [2, 1 << 31]):
        with pytest.raises(FrameInvalid, match="names block"):
            writer.write_part(GENERATION, [[0, 1]], [table], Part(0, 8, 0, 4))
        with pytest.raises(FrameInvalid, match="names block"):
            writer.write_unit(GENERATION, torch.zeros(8 * 192, dtype=torch.uint8), [table], Part(0, 8, 0, 4))
    with pytest.raises(FrameInvalid, match="no whole blocks"):
        DirectWriter(cache, layout, FakePair(cache.view(-1)[:-1]), layout)


def test_a_converted_write_stays_within_the_limit_of_a_window():
    source, target = KVLayout(8, 4, 64, 512, "fp32"), KVLayout(8, 4, 64, 512, "bf16")
    largest = 0

    class Watch(FakePair):
        @contextlib.contextmanager
        def window(self, generation: int, window: int) -> Iterator[bool]:
            nonlocal largest
            before = self.pool.numpy().copy()
            yield True
            largest = max(largest, int(np.count_nonzero(before != self.pool.numpy())))

    have, cache = make_cache(source, 1, 1), make_cache(target, 1, 2).zero_()
    assert DirectWriter(have, source, Watch(cache), target).write_part(GENERATION, [[0]], [[0]], Part(0, 512, 0, 8))
    assert 0 < largest <= WINDOW_BYTES
