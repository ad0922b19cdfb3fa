"""Any interleaving of allocate, share, release, quarantine and prove keeps every block in exactly one place."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engine.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of (block, references) holdings and a set of quarantined blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.holdings: list[list[int]] = []
        self.quarantined: set[int] = set()

    @rule(num=st.integers(0, 12))
    def allocate(self, num: int) -> None:
        if num <= self.pool.num_free:
            blocks = self.pool.allocate(num)
            taken = {block for holding in self.holdings for block in holding} | self.quarantined
            assert len(set(blocks)) == num
            assert not set(blocks) & taken
            self.holdings.append(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holdings:
            blocks = data.draw(st.sampled_from(self.holdings))
            self.pool.share(blocks)
            self.holdings.append(list(blocks))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.holdings:
            return
        blocks = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        elsewhere = {block for holding in self.holdings for block in holding}
        written = [block for block in blocks if block not in elsewhere and data.draw(st.booleans())]
        self.pool.release(blocks, written)
        self.quarantined |= set(written)

    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        proven = [block for block in sorted(self.quarantined) if data.draw(st.booleans())]
        self.pool.prove(proven)
        self.quarantined -= set(proven)

    @invariant()
    def each_block_is_in_one_place(self) -> None:
        self.pool.check_integrity()
        used = {block for holding in self.holdings for block in holding}
        assert self.pool.num_used == len(used)
        assert self.pool.num_quarantined == len(self.quarantined)
        assert self.pool.num_free == 12 - len(used) - len(self.quarantined)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
