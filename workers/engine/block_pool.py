"""Who holds each KV block. Knows block numbers only; the bytes are in `runner/kv_cache.py`.

    free --allocate--> used (references >= 1) --release--> free
                                              --release, quarantined--> quarantine --prove--> free

A block in quarantine may still be written by a transfer that was revoked: nothing but the proof brings it back, no
clock does. Owned by the engine thread.
"""

from collections.abc import Collection, Sequence


class BlockPool:
    """`num_blocks` numbered blocks, each free, used or quarantined."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # The last freed is the next used: its bytes are the likeliest to be in a CPU cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._quarantine: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantine)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._quarantine)

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks with one reference each; the caller has checked `num_free`."""
        assert 0 <= num_blocks <= len(self._free), f"{num_blocks} blocks asked, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these used blocks."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is shared but not used"
            self._references[block] += 1

    def release(self, blocks: Sequence[int], quarantine: Collection[int] = ()) -> None:
        """One reference less to each; a block without any is free, or in quarantine where it is listed there."""
        assert set(quarantine) <= set(blocks), f"quarantine {sorted(quarantine)} names blocks that are not released"
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released but not used"
            self._references[block] -= 1
            if self._references[block] > 0:
                assert block not in quarantine, f"block {block} is in an open write window and shared"
            elif block in quarantine:
                self._quarantine.add(block)
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
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        used = {block for block, count in enumerate(self._references) if count}
        assert all(count >= 0 for count in self._references), "a block has fewer than no references"
        assert not free & used, f"blocks {sorted(free & used)} are free and used"
        assert not free & self._quarantine, f"blocks {sorted(free & self._quarantine)} are free and quarantined"
        assert not used & self._quarantine, f"blocks {sorted(used & self._quarantine)} are used and quarantined"
        assert len(free) + len(used) + len(self._quarantine) == self.num_blocks, "a block is lost"
