"""Moves KV state between the paged cache and the contiguous units that travel.

Knows torch and the two shapes. Knows no transfer and no socket.

    cache   data[index, block, K|V, head, slot, dim]   layer l at places[l] = (group, index);
                                                       token t in tables[group][t // block_tokens], slot t %
                                                       block_tokens
    unit    unit[layer, K|V, head, token, dim]         contiguous, in the receiving cache's dtype

Both directions copy run by run: a run is the part of one block that the unit covers. At a run of 32 tokens of 30 layers
the copy is 0.4-0.7 MB, so the 5 microseconds of each call vanish; `index_copy_` over many small rows is five times
slower on CPU.

Where a table says NULL_BLOCK a window slid past: the sender sends zeros, the receiver writes nothing. What slid out at
the sender, whose prompt was not longer, is nothing that the receiver still has a block for.
"""

import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kv_transfer.layout import NULL_BLOCK, Dtype, KeyOrder, KVLayout

Tables = Sequence[Sequence[int]]
"""Block tables of one request from token 0, one per group."""
TORCH_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def iterate_runs(
    blocks: Sequence[int], block_tokens: int, first_token: int, num_tokens: int
) -> Iterator[tuple[int, int, int, int]]:
    """(block id, first slot, offset in the unit, num_tokens) of each stretch of a unit that lies in one block."""
    token, end = first_token, first_token + num_tokens
    while token < end:
        slot = token % block_tokens
        count = min(block_tokens - slot, end - token)
        yield blocks[token // block_tokens], slot, token - first_token, count
        token += count


class CacheView(NamedTuple):
    """A cache as both of its halves look to a copy: `[layers_per_group, blocks, num_kv_heads, block_tokens, head_dim]`
    each."""

    keys: Tensor
    values: Tensor
    places: tuple[tuple[int, int], ...]
    """Of each layer its group and its index in the group's blocks."""

    @property
    def block_tokens(self) -> int:
        return self.values.shape[3]

    def iterate_parts(self, first_layer: int, num_layers: int) -> Iterator[tuple[int, slice, slice]]:
        """(group, indices in its blocks, layers in the unit) of each stretch of a unit's layers that lie together."""
        layer, end = first_layer, first_layer + num_layers
        while layer < end:
            group, index = self.places[layer]
            count = 1
            while layer + count < end and self.places[layer + count] == (group, index + count):
                count += 1
            yield group, slice(index, index + count), slice(layer - first_layer, layer - first_layer + count)
            layer += count

    def touched_blocks(
        self, tables: Tables, first_token: int, num_tokens: int, first_layer: int, num_layers: int
    ) -> tuple[int, ...]:
        """The blocks that a unit of these tokens and layers writes."""
        groups = {group for group, _ in self.places[first_layer : first_layer + num_layers]}
        pages = slice(first_token // self.block_tokens, -(-(first_token + num_tokens) // self.block_tokens))
        return tuple(block for group in sorted(groups) for block in tables[group][pages] if block != NULL_BLOCK)


def view_cache(
    data: Tensor, keys: KeyOrder = "token_major", places: tuple[tuple[int, int], ...] | None = None
) -> CacheView:
    """Views of `data` `[layers_per_group, blocks, 2, num_kv_heads, block_tokens, head_dim]`, whatever the order of K in
    a block. Without `places` there is one group."""
    key_half, value_half = data[:, :, 0], data[:, :, 1]
    if keys == "dim_major":
        layers, blocks, heads, block_tokens, head_dim = key_half.shape
        key_half = key_half.view(layers, blocks, heads, head_dim, block_tokens).transpose(-1, -2)
    return CacheView(key_half, value_half, places or tuple((0, index) for index in range(data.shape[0])))


def gather_unit(
    cache: CacheView, tables: Tables, first_token: int, num_tokens: int, first_layer: int, num_layers: int,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A fresh contiguous unit `[num_layers, 2, num_kv_heads, num_tokens, head_dim]` in `dtype` (default: the cache's),
    zero where a window slid past."""
    _, _, num_heads, block_tokens, head_dim = cache.values.shape
    shape = (num_layers, 2, num_heads, num_tokens, head_dim)
    unit = torch.empty(shape, dtype=dtype or cache.values.dtype, device=cache.values.device)
    for group, indices, layers in cache.iterate_parts(first_layer, num_layers):
        for block, slot, offset, count in iterate_runs(tables[group], block_tokens, first_token, num_tokens):
            if block == NULL_BLOCK:
                unit[layers, :, :, offset : offset + count] = 0
                continue
            for half, stored in enumerate((cache.keys, cache.values)):
                unit[layers, half, :, offset : offset + count].copy_(stored[indices, block, :, slot : slot + count])
    return unit


def scatter_unit(cache: CacheView, tables: Tables, unit: Tensor, first_token: int, first_layer: int) -> None:
    """Writes a unit into the cache; the inverse of `gather_unit`. Slots outside the unit's tokens stay untouched, and
    what has no block is dropped."""
    num_layers, _, _, num_tokens, _ = unit.shape
    for group, indices, layers in cache.iterate_parts(first_layer, num_layers):
        for block, slot, offset, count in iterate_runs(tables[group], cache.block_tokens, first_token, num_tokens):
            if block == NULL_BLOCK:
                continue
            for half, stored in enumerate((cache.keys, cache.values)):
                stored[indices, block, :, slot : slot + count].copy_(unit[layers, half, :, offset : offset + count])


def as_bytes(unit: Tensor) -> Tensor:
    """The unit's memory as a flat uint8 tensor, without a copy."""
    return unit.view(-1).view(torch.uint8)


def as_unit(buffer: Tensor, layout: KVLayout, num_tokens: int, num_layers: int) -> Tensor:
    """A received flat uint8 buffer as `[num_layers, 2, num_kv_heads, num_tokens, head_dim]` in the layout's dtype, no
    copy."""
    shape = (num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
    return buffer.view(TORCH_DTYPES[layout.dtype]).view(shape)


def digest_of(buffer: Tensor) -> int:
    """CRC-32 of a flat uint8 CPU tensor: guards against corruption, not against attackers. Releases the GIL (4
    GB/s)."""
    return zlib.crc32(buffer.numpy().data)


class StagingBuffers:
    """Buffers of one receiving lane, reused so that a unit does not fault fresh pages each time. Any thread."""

    def __init__(self, max_free: int = 4) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._max_free = max_free

    def take(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer of exactly `num_bytes`; its content is arbitrary."""
        with self._lock:
            for position, buffer in enumerate(self._free):
                if buffer.numel() == num_bytes:
                    return self._free.pop(position)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer that nothing refers to any more; the oldest unused one is dropped when there are too
        many."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > self._max_free:
                self._free.pop(0)
