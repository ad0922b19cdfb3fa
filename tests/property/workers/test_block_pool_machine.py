"""Any interleaving of allocate, keep, share, release, quarantine and prove keeps every block in exactly one place."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.state_machines import run_steps
from workers.engine.block_pool import BlockPool

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of holdings (blocks, one reference each), kept blocks, cached ones in order of use, and
    quarantine."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.pool.on_evict = self.evict
        self.holdings: list[list[int]] = []
        self.kept: set[int] = set()
        self.cached: list[int] = []
        self.quarantined: set[int] = set()

    def evict(self, block: int) -> None:
        assert not self.pool.num_free, "a free block was at hand"
        assert block == self.cached.pop(0), "the least recently used goes first"
        self.kept.remove(block)

    @rule(num=st.integers(0, NUM_BLOCKS))
    def allocate(self, num: int) -> None:
        if num <= self.pool.num_available:
            blocks = self.pool.allocate(num)
            taken = {block for holding in self.holdings for block in holding} | self.quarantined | set(self.cached)
            assert len(set(blocks)) == num
            assert not set(blocks) & taken
            assert all(self.pool.is_private(block) for block in blocks)
            self.holdings.append(blocks)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        for holding in self.holdings:
            for block in holding:
                if data.draw(st.booleans()):
                    self.pool.keep(block)
                    self.kept.add(block)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A new holder finds some of what is used and some of what is cached."""
        found = sorted({block for holding in self.holdings for block in holding} | set(self.cached))
        blocks = [block for block in found if data.draw(st.booleans())]
        assert self.pool.count_unreferenced(blocks) == len(set(blocks) & set(self.cached))
        self.pool.share(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        self.holdings.append(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.holdings:
            return
        blocks = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        elsewhere = {block for holding in self.holdings for block in holding}
        last = [block for block in blocks if block not in elsewhere]
        written = [block for block in last if block not in self.kept and data.draw(st.booleans())]
        self.pool.release(blocks, written)
        self.quarantined |= set(written)
        self.cached += [block for block in reversed(last) if block in self.kept]

    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        proven = [block for block in sorted(self.quarantined) if data.draw(st.booleans())]
        self.pool.prove(proven)
        self.quarantined -= set(proven)

    @invariant()
    def each_block_is_in_one_place(self) -> None:
        pool = self.pool
        pool.check_integrity()
        used = {block for holding in self.holdings for block in holding}
        counts = (pool.num_used, pool.num_cached, pool.num_quarantined)
        assert counts == (len(used), len(self.cached), len(self.quarantined))
        assert pool.num_free + sum(counts) == NUM_BLOCKS


@pytest.mark.timeout(900)
def test_pool(is_full: bool) -> None:
    run_steps(PoolMachine, is_full, 40)
