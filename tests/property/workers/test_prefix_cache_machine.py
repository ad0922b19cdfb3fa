"""Any interleaving of requests over one pool: what the cache gives is what somebody computed for exactly these tokens,
nothing that is shared is written, and every block is free, used, cached or quarantined.
"""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.state_machines import run_steps
from workers.engine.block_pool import BlockPool
from workers.engine.prefix_cache import NULL_BLOCK, PrefixCache, first_page_seen
from workers.prefix_hash import extend_chain, root_of

S, NUM_BLOCKS = 2, 24


@dataclass(eq=False)
class Holder:
    """A request: its text, what is computed, its tables (one per group)."""

    tenant: bytes
    tokens: list[int]
    chain: list[bytes]
    tables: list[list[int]]
    num_shared: int
    """Pages taken from the cache."""
    computed: int
    entered: int


class PrefixMachine(RuleBasedStateMachine):
    """The model: for each block the (tenant, text up to its end, group) whose KV it holds."""

    windows: tuple[int | None, ...] = (None, 5)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, S, self.windows)
        self.holders: list[Holder] = []
        self.quarantined: set[int] = set()
        self.content: dict[int, object] = {}
        self.known: set[bytes] = set()

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), tenant=st.sampled_from((b"", b"a")))
    def arrive(self, tokens: list[int], tenant: bytes) -> None:
        chain: list[bytes] = []
        extend_chain(chain, root_of(tenant), tokens, S, len(tokens) // S)
        num_shared = self.cache.match(chain, (len(tokens) - 1) // S)
        tables = self.cache.tables(chain, num_shared)
        shared = [block for table in tables for block in table if block != NULL_BLOCK]
        wanted = len(self.windows) * (-(-len(tokens) // S) - num_shared)
        if self.pool.num_available - self.pool.count_unreferenced(shared) < wanted:
            return
        self.check_hit(tenant, tokens, tables, num_shared)
        self.pool.share(shared)
        for table in tables:
            table += self.pool.allocate(-(-len(tokens) // S) - num_shared)
        self.holders.append(Holder(tenant, tokens, chain, tables, num_shared, num_shared * S, num_shared))

    def check_hit(self, tenant: bytes, tokens: list[int], tables: list[list[int]], num_shared: int) -> None:
        for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
            first = first_page_seen(num_shared * S, window, S)
            assert table[:first] == [NULL_BLOCK] * first
            for page in range(first, num_shared):
                assert self.content[table[page]] == (tenant, tuple(tokens[: (page + 1) * S]), group)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        end = min(len(holder.tokens), holder.computed + num_tokens)
        for page in range(holder.computed // S, -(-end // S)):
            for group, table in enumerate(holder.tables):
                block = table[page]
                assert self.pool.is_private(block), "a shared block is written"
                text = tuple(holder.tokens[: min(end, (page + 1) * S)])
                self.content[block] = (holder.tenant, text, group)
        holder.computed = end
        self.cache.enter(holder.chain, holder.tables, holder.entered, end // S)
        holder.entered = end // S

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        """Pages that no later token sees leave the table."""
        holder = data.draw(st.sampled_from(self.holders))
        for table, window in zip(holder.tables, self.windows, strict=True):
            for page in range(min(first_page_seen(holder.computed, window, S), len(table))):
                if table[page] != NULL_BLOCK:
                    self.pool.release([table[page]])
                    table[page] = NULL_BLOCK

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """It ends, is preempted, or its grant is revoked while blocks that nobody shares are still being written."""
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        written = []
        if holder.computed == holder.num_shared * S:
            own = [block for table in holder.tables for block in table[holder.num_shared :]]
            written = [block for block in own if data.draw(st.booleans())]
        for table in holder.tables:
            held = [block for block in table if block != NULL_BLOCK]
            self.pool.release(held, [block for block in written if block in held])
        self.quarantined |= set(written)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        proven = [block for block in sorted(self.quarantined) if data.draw(st.booleans())]
        for block in proven:
            self.content[block] = "late write"
        self.pool.prove(proven)
        self.quarantined -= set(proven)

    @rule()
    def hear(self) -> None:
        added, removed = self.cache.take_changes()
        assert not set(added) & self.known
        assert set(removed) <= self.known
        self.known = (self.known | set(added)) - set(removed)
        assert self.known == set(self.cache.published())

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def each_block_is_in_one_place(self) -> None:
        self.pool.check_integrity()
        self.cache.check_integrity()
        used = {b for holder in self.holders for table in holder.tables for b in table if b != NULL_BLOCK}
        pool = self.pool
        assert (pool.num_used, pool.num_quarantined) == (len(used), len(self.quarantined))
        assert pool.num_free + pool.num_used + pool.num_cached + pool.num_quarantined == NUM_BLOCKS


class WindowsOnlyMachine(PrefixMachine):
    windows = (3,)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", [PrefixMachine, WindowsOnlyMachine])
def test_prefix_cache(machine: type[PrefixMachine], is_full: bool) -> None:
    run_steps(machine, is_full, 50)
