"""Writes parts of one cache into the pool of a peer, over a one-sided pair: where a `gather`, a send and a `scatter`
stand otherwise.

Knows the two caches. Knows no transfer and no socket.
"""

from torch import Tensor

from kv_transfer.copies import CacheShape, Part, has_equal_rows, plan_copies
from kv_transfer.errors import FrameInvalid
from kv_transfer.fence import WINDOW_BYTES, make_window
from kv_transfer.layout import NULL_BLOCK, KVLayout
from kv_transfer.staging import TORCH_DTYPES, CacheView, Tables, as_unit, gather_unit, iterate_runs, view_cache
from kv_transfer.transports.base import WriterPair


class DirectWriter:
    """From `data`, a cache of layout `ours`, into the pool at the other end of `pair`, a cache of layout `theirs`.

    Both writes return False when the generation is revoked. They raise `PeerLost`, and `FrameInvalid` for a table with
    a block outside the pool. One thread at a time per generation.
    """

    def __init__(self, data: Tensor, ours: KVLayout, pair: WriterPair, theirs: KVLayout) -> None:
        """Raises `FrameInvalid` when the pool is no cache of layout `theirs`."""
        self._data, self._pair, self._theirs = data, pair, theirs
        self._source = CacheShape(ours, data.shape[1])
        block_bytes = CacheShape(theirs, 1).num_bytes
        self._num_blocks, rest = divmod(pair.pool.numel(), block_bytes)
        if rest:
            raise FrameInvalid(f"a pool of {pair.pool.numel()} bytes holds no whole blocks of {block_bytes}")
        self._target = CacheShape(theirs, self._num_blocks)
        self._is_copy = has_equal_rows(ours, theirs)
        self._cache = view_cache(data, ours.keys, ours.places)
        target = pair.pool.view(TORCH_DTYPES[theirs.dtype]).view(theirs.cache_shape(self._num_blocks))
        self._target_cache: CacheView = view_cache(target, theirs.keys, theirs.places)

    def write_part(self, generation: int, tables: Tables, target_tables: Tables, part: Part) -> bool:
        """Writes from our blocks into theirs: one copy where the rows are equal, else converted on the way."""
        self._check(target_tables)
        if self._is_copy:
            copies = plan_copies(self._source, tables, self._target, target_tables, part)
            return self._pair.copy(generation, copies, self._data)
        unit = gather_unit(self._cache, tables, *part, dtype=TORCH_DTYPES[self._theirs.dtype])
        return self._scatter(generation, unit, target_tables, part)

    def write_unit(self, generation: int, buffer: Tensor, target_tables: Tables, part: Part) -> bool:
        """Writes a unit that was gathered before: flat uint8, in the dtype of `theirs`."""
        self._check(target_tables)
        unit = as_unit(buffer, self._theirs, part.num_tokens, part.num_layers)
        return self._scatter(generation, unit, target_tables, part)

    def _check(self, tables: Tables) -> None:
        last = max((block for table in tables for block in table), default=NULL_BLOCK)
        if last >= self._num_blocks:
            raise FrameInvalid(f"a grant names block {last} of a pool of {self._num_blocks}")

    def _scatter(self, generation: int, unit: Tensor, target_tables: Tables, part: Part) -> bool:
        """A window per block and as many layers as it holds, at least one."""
        cache, block_tokens = self._target_cache, self._theirs.block_tokens
        for group, indices, layers in cache.iterate_parts(part.first_layer, part.num_layers):
            runs = iterate_runs(target_tables[group], block_tokens, part.first_token, part.num_tokens)
            for block, slot, offset, count in runs:
                if block == NULL_BLOCK:
                    continue
                page = (part.first_token + offset) // block_tokens
                step = max(1, WINDOW_BYTES // self._theirs.unit_bytes(count, 1))
                source = unit[layers, :, :, offset : offset + count]
                for low in range(0, source.shape[0], step):
                    into = slice(indices.start + low, min(indices.start + low + step, indices.stop))
                    with self._pair.window(generation, make_window(group, page)) as is_open:
                        if not is_open:
                            return False
                        _write(cache, into, block, slice(slot, slot + count), source[low : low + step])
        return True


def _write(cache: CacheView, indices: slice, block: int, slots: slice, source: Tensor) -> None:
    for half, stored in enumerate((cache.keys, cache.values)):
        stored[indices, block, :, slots].copy_(source[:, half])
