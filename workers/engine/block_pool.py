"""Who holds each KV block. Knows block numbers only; the bytes are in `runner/kv_cache.py`, the names of what is worth
keeping in `prefix_cache.py`.

    free --allocate--> used (references >= 1) --release--> free
                                              --release, kept--> cached --share--> used
                                              --release, quarantined--> quarantine --prove--> free
    cached --allocate, when no block is free--> used, and whoever named it is told

free + cached + quarantined + used is every block. A block in quarantine may still be written by a transfer that was
revoked: nothing but the proof brings it back, no clock does. Owned by the engine thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence


def _forget_nothing(block: int) -> None:
    """Nobody names blocks."""


class BlockPool:
    """`num_blocks` numbered blocks, each free, used, cached or quarantined."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = _forget_nothing
        """Told of each cached block that is taken for something else."""
        # The last freed is the next used: its bytes are the likeliest to be in a CPU cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._is_kept = [False] * num_blocks
        self._quarantine: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached) - len(self._quarantine)

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks with one reference each, free ones first, then the least recently used of the cached ones.

        The caller has checked `num_available`.
        """
        assert 0 <= num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._is_kept[block] = False
        self.on_evict(block)
        return block

    def keep(self, block: int) -> None:
        """This used block is final and worth keeping: without references it is cached instead of free."""
        assert self._references[block] > 0, f"block {block} is kept but not used"
        self._is_kept[block] = True

    def is_kept(self, block: int) -> bool:
        return self._is_kept[block]

    def is_private(self, block: int) -> bool:
        """Whether its one holder may write into it: nobody shares it and nobody will find it by name."""
        return self._references[block] == 1 and not self._is_kept[block]

    def count_unreferenced(self, blocks: Collection[int]) -> int:
        """How many of these are cached and would no longer be available once shared."""
        return sum(block in self._cached for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these used or cached blocks."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
            else:
                assert self._references[block] > 0, f"block {block} is shared but neither used nor cached"
            self._references[block] += 1

    def release(self, blocks: Sequence[int], quarantine: Collection[int] = ()) -> None:
        """One reference less to each; a block without any is cached if kept, in quarantine where listed there, else
        free. The last of them are evicted first: a chain loses its tail before its head.
        """
        assert set(quarantine) <= set(blocks), f"quarantine {sorted(quarantine)} names blocks that are not released"
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released but not used"
            self._references[block] -= 1
            if block in quarantine:
                assert not self._references[block], f"block {block} is in an open write window and shared"
                assert not self._is_kept[block], f"block {block} is in an open write window and kept"
                self._quarantine.add(block)
            elif not self._references[block]:
                self._give_back(block)

    def _give_back(self, block: int) -> None:
        if self._is_kept[block]:
            self._cached[block] = None
        else:
            self._free.append(block)

    def prove(self, blocks: Collection[int]) -> None:
        """Nothing writes into these quarantined blocks any more: they are free."""
        for block in blocks:
            assert block in self._quarantine, f"block {block} is proven but not in quarantine"
            self._quarantine.remove(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Assert that each block is in exactly one state; for tests and for the idle moment of a worker."""
        assert len(set(self._free)) == len(self._free), "a block is twice in the free list"
        assert all(count >= 0 for count in self._references), "a block has fewer than no references"
        used = {block for block, count in enumerate(self._references) if count}
        places = {"free": set(self._free), "used": used, "cached": set(self._cached), "quarantined": self._quarantine}
        owner: dict[int, str] = {}
        for place, blocks in places.items():
            for block in blocks:
                assert block not in owner, f"block {block} is {owner[block]} and {place}"
                owner[block] = place
        assert len(owner) == self.num_blocks, f"blocks {sorted(set(range(self.num_blocks)) - set(owner))} are lost"
        kept = {block for block, is_kept in enumerate(self._is_kept) if is_kept}
        assert set(self._cached) <= kept <= used | set(self._cached), "a block is kept where nobody finds it"
