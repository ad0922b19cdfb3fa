"""The copies that bring a part of a prompt's KV from one cache straight into another of the same dtype and key order.

Numbers only: no torch, no addresses. A cache is `[layers_per_group, num_blocks, 2, num_kv_heads, block_tokens,
head_dim]`; a run is the longest stretch of tokens that lies in one block on either side. A run of whole blocks is one
row per layer; of a part of a block, one row per layer, half and head, and where K lies dim-major one per dim.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_transfer.fence import COPY_FIELDS, Copies, make_window
from kv_transfer.layout import ELEMENT_BYTES, NULL_BLOCK, KVLayout

Tables = Sequence[Sequence[int]]
Numbers = NDArray[np.int64]


class CacheShape(NamedTuple):
    """Where things lie in one cache; all strides in bytes."""

    layout: KVLayout
    num_blocks: int

    @property
    def slot_bytes(self) -> int:
        """One token of one head of one half."""
        return self.layout.head_dim * ELEMENT_BYTES[self.layout.dtype]

    @property
    def head_bytes(self) -> int:
        return self.slot_bytes * self.layout.block_tokens

    @property
    def half_bytes(self) -> int:
        return self.head_bytes * self.layout.num_kv_heads

    @property
    def place_bytes(self) -> int:
        """One block of one layer."""
        return 2 * self.half_bytes

    @property
    def layer_bytes(self) -> int:
        return self.place_bytes * self.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.layer_bytes * self.layout.layers_per_group


class Part(NamedTuple):
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int


def has_equal_rows(source: KVLayout, target: KVLayout) -> bool:
    """Whether bytes may be copied as they are; else they must be converted."""
    return (source.dtype, source.keys) == (target.dtype, target.keys)


def iterate_layers(layout: KVLayout, first_layer: int, num_layers: int) -> Iterator[tuple[int, int, int]]:
    """(group, index in its blocks, count) of each stretch of layers that lie together."""
    layer, end = first_layer, first_layer + num_layers
    while layer < end:
        group, index = layout.places[layer]
        count = 1
        while layer + count < end and layout.places[layer + count] == (group, index + count):
            count += 1
        yield group, index, count
        layer += count


def plan_copies(
    source: CacheShape, source_tables: Tables, target: CacheShape, target_tables: Tables, part: Part
) -> Copies:
    """The copies of a part, in token order; what has no block at either end is left out.

    Both caches have the same groups, heads and head_dim, and equal rows (`has_equal_rows`).
    """
    assert has_equal_rows(source.layout, target.layout), "rows that differ are converted, not copied"
    copies: list[Copies] = []
    for group, index, count in iterate_layers(target.layout, part.first_layer, part.num_layers):
        runs = _Runs.cut(source, source_tables[group], target, target_tables[group], part)
        windows = make_window(group, 0) | runs.target_page
        copies += _copy_layers(source, target, runs, windows, index, count)
    return copies[0] if len(copies) == 1 else np.concatenate(copies)


class _Runs(NamedTuple):
    """Arrays of one number per run."""

    source_block: Numbers
    source_slot: Numbers
    target_block: Numbers
    target_slot: Numbers
    target_page: Numbers
    length: Numbers

    @classmethod
    def cut(
        cls,
        source: CacheShape,
        source_table: Sequence[int],
        target: CacheShape,
        target_table: Sequence[int],
        part: Part,
    ) -> "_Runs":
        first, end = part.first_token, part.first_token + part.num_tokens
        sizes = {source.layout.block_tokens, target.layout.block_tokens}
        inner = [np.arange(first - first % size + size, end, size, dtype=np.int64) for size in sizes]
        within = inner[0] if len(inner) == 1 else np.union1d(*inner)
        edges = np.concatenate(([first], within, [end]))
        source_block, source_slot, _ = _locate(edges[:-1], source, source_table)
        target_block, target_slot, target_page = _locate(edges[:-1], target, target_table)
        runs = cls(source_block, source_slot, target_block, target_slot, target_page, np.diff(edges))
        held = (source_block != NULL_BLOCK) & (target_block != NULL_BLOCK)
        return runs if held.all() else cls(*(numbers[held] for numbers in runs))


def _locate(tokens: Numbers, shape: CacheShape, table: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
    """(block, slot, page) of each token."""
    page, slot = np.divmod(tokens, shape.layout.block_tokens)
    first, last = int(page[0]), int(page[-1])
    return np.array(table[first : last + 1], np.int64)[page - first], slot, page


def _copy_layers(
    source: CacheShape, target: CacheShape, runs: _Runs, windows: Numbers, index: int, count: int
) -> list[Copies]:
    heads, layout = target.layout.num_kv_heads, target.layout
    from_block = runs.source_block * source.place_bytes + index * source.layer_bytes
    to_block = runs.target_block * target.place_bytes + index * target.layer_bytes
    outer = (count, source.layer_bytes, target.layer_bytes)
    is_whole = (runs.length == source.layout.block_tokens) & (runs.length == target.layout.block_tokens)
    whole = _rows((from_block, to_block, source.place_bytes), (1, 0, 0), outer, windows)
    if is_whole.all():
        return [whole]
    from_slot, to_slot = runs.source_slot * source.slot_bytes, runs.target_slot * target.slot_bytes
    part_bytes = runs.length * source.slot_bytes
    if layout.keys == "token_major":
        inner = (2 * heads, source.head_bytes, target.head_bytes)
        parts = [_rows((from_block + from_slot, to_block + to_slot, part_bytes), inner, outer, windows)]
    else:
        element = ELEMENT_BYTES[layout.dtype]
        key = (from_block + runs.source_slot * element, to_block + runs.target_slot * element, runs.length * element)
        dims = (heads * layout.head_dim, source.layout.block_tokens * element, target.layout.block_tokens * element)
        value = (from_block + source.half_bytes + from_slot, to_block + target.half_bytes + to_slot, part_bytes)
        parts = [
            _rows(key, dims, outer, windows),
            _rows(value, (heads, source.head_bytes, target.head_bytes), outer, windows),
        ]
    return [whole[is_whole], *(part[~is_whole] for part in parts)]


def _rows(
    run: tuple[Numbers, Numbers, Numbers | int], inner: tuple[int, int, int], outer: tuple[int, int, int],
    windows: Numbers,
) -> Copies:  # fmt: skip
    """One copy per run: its (source, target, row_bytes), and (count, source stride, target stride) of both loops."""
    copies = np.empty((len(windows), COPY_FIELDS), np.int64)
    copies[:, 0], copies[:, 1], copies[:, 2] = run
    copies[:, 3:9] = (inner[0], outer[0], *inner[1:], *outer[1:])
    copies[:, 9] = windows
    return copies
