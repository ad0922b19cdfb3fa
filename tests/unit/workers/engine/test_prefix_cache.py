"""Names of blocks, the longest usable prefix, and what is told to ingresses."""

import pytest

from workers.engine.block_pool import BlockPool
from workers.engine.prefix_cache import NULL_BLOCK, PrefixCache, first_page_seen
from workers.prefix_hash import extend_chain, root_of
from workers.protocol import NAME_BYTES

S = 4


def chain_of(tokens: list[int], tenant: bytes = b"", block_tokens: int = S) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, root_of(tenant), tokens, block_tokens, len(tokens) // block_tokens)
    return chain


class Rig:
    def __init__(self, num_blocks: int = 12, windows: tuple[int | None, ...] = (None,)) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, S, windows)
        self.num_groups = len(windows)

    def compute(self, chain: list[bytes]) -> list[list[int]]:
        """A request that computes these blocks anew and enters them; it still holds them."""
        tables = [self.pool.allocate(len(chain)) for _ in range(self.num_groups)]
        self.cache.enter(chain, tables, 0, len(chain))
        return tables

    def finish(self, tables: list[list[int]]) -> None:
        for table in tables:
            self.pool.release([block for block in table if block != NULL_BLOCK])
        self.pool.check_integrity()
        self.cache.check_integrity()


def test_a_name_stands_for_all_tokens_before_it_and_for_the_tenant() -> None:
    one, other = chain_of([1, 2, 3, 4, 5, 6, 7, 8]), chain_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert len({*one, *other}) == 4
    assert {len(name) for name in one} == {NAME_BYTES}
    assert chain_of([1, 2, 3, 4, 0, 0, 0, 0])[0] == one[0]
    assert set(chain_of([1, 2, 3, 4, 5, 6, 7, 8], b"tenant")).isdisjoint(one)
    assert chain_of([1, 2, 3, 4, 5, 6, 7, 8], block_tokens=8)[0] not in one


def test_a_chain_grows_to_the_same_names() -> None:
    tokens, chain = list(range(40)), list[bytes]()
    for num_blocks in (0, 1, 1, 4, 10):
        extend_chain(chain, root_of(b"t"), tokens, S, num_blocks)
        assert len(chain) == num_blocks
    assert chain == chain_of(tokens, b"t")
    with pytest.raises(AssertionError, match="not full"):
        extend_chain(chain, root_of(b"t"), tokens, S, 11)


def test_a_prefix_ends_at_the_first_missing_block() -> None:
    rig = Rig()
    chain = chain_of(list(range(20)))
    tables = rig.compute(chain[:3])
    assert rig.cache.match(chain, 5) == 3
    assert rig.cache.match(chain, 2) == 2
    assert rig.cache.match(chain_of([7, *range(1, 20)]), 5) == 0
    assert rig.cache.tables(chain, 2) == [tables[0][:2]]


def test_blocks_stay_known_after_use_until_they_are_taken() -> None:
    rig = Rig(num_blocks=5)
    chain = chain_of(list(range(16)))
    rig.finish(rig.compute(chain))
    assert (rig.cache.match(chain, 4), rig.pool.num_cached, rig.pool.num_available) == (4, 4, 5)
    rig.pool.allocate(3)
    assert rig.cache.match(chain, 4) == 2, "the tail went first"
    rig.cache.check_integrity()


def test_of_two_blocks_with_one_name_the_first_is_known() -> None:
    rig = Rig()
    chain = chain_of(list(range(8)))
    first, second = rig.compute(chain), rig.compute(chain)
    rig.finish(second)
    assert (rig.pool.num_cached, len(rig.cache)) == (0, 2)
    assert rig.cache.tables(chain, 2) == first


@pytest.mark.parametrize(
    ("position", "window", "page"), [(0, 6, 0), (6, 6, 0), (8, 6, 0), (9, 6, 1), (40, None, 0), (8, 1, 2), (7, 1, 1)]
)
def test_a_window_sees_so_far_back(position: int, window: int | None, page: int) -> None:
    assert first_page_seen(position, window, S) == page


def test_a_window_group_needs_the_last_blocks_only() -> None:
    rig = Rig(num_blocks=20, windows=(None, 6))
    chain = chain_of(list(range(24)))
    tables = rig.compute(chain)
    assert rig.cache.match(chain, 6) == 6
    found = rig.cache.tables(chain, 6)
    assert found[0] == tables[0]
    assert found[1] == [NULL_BLOCK] * 4 + tables[1][4:]


def test_a_hole_in_a_window_shortens_the_prefix_to_where_no_page_is_missing() -> None:
    rig = Rig(num_blocks=20, windows=(None, 6))
    chain = chain_of(list(range(24)))
    whole, slid = rig.pool.allocate(6), rig.pool.allocate(6)
    slid[4] = NULL_BLOCK
    rig.cache.enter(chain, [whole, slid], 0, 6)
    assert rig.cache.match(chain, 6) == 4, "5 and 6 blocks both need page 4"
    other = Rig(num_blocks=20, windows=(6, None))
    whole, slid = other.pool.allocate(6), other.pool.allocate(6)
    slid[0] = slid[1] = slid[4] = NULL_BLOCK
    other.cache.enter(chain, [slid, whole], 0, 6)
    assert other.cache.match(chain, 6) == 4
    assert other.cache.match(chain, 3) == 0, "3 blocks need page 1"


def test_changes_cancel_out_and_are_told_once() -> None:
    rig = Rig(num_blocks=2)
    one, two = chain_of(list(range(8))), chain_of(list(range(50, 58)))
    rig.finish(rig.compute(one))
    assert rig.cache.take_changes() == (one, [])
    rig.finish(rig.compute(two))
    assert rig.cache.published() == two
    rig.finish(rig.compute(one))
    assert rig.cache.take_changes() == ([], []), "two came and went, one went and came"
    rig.finish(rig.compute(two))
    added, removed = rig.cache.take_changes()
    assert (added, sorted(removed)) == (two, sorted(one))
    assert rig.cache.take_changes() == ([], [])
