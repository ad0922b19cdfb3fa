"""Each block is free, used, cached or quarantined, and misuse is an assertion."""

import pytest

from workers.engine.block_pool import BlockPool


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    pool.release(first)
    assert (pool.num_free, pool.num_used, pool.num_quarantined) == (3, 1, 0)
    assert sorted(pool.allocate(3)) == sorted(first)


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_quarantine_ends_with_proof_only() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.release(blocks, quarantine=blocks[:1])
    assert (pool.num_free, pool.num_quarantined) == (1, 1)
    assert pool.allocate(1) == blocks[1:]
    pool.prove(blocks[:1])
    assert (pool.num_free, pool.num_quarantined) == (1, 0)
    pool.check_integrity()


def test_a_kept_block_is_cached_until_it_is_shared_or_taken() -> None:
    pool, evicted = BlockPool(3), []
    pool.on_evict = evicted.append
    blocks = pool.allocate(3)
    pool.keep(blocks[0])
    pool.keep(blocks[1])
    assert [pool.is_private(block) for block in blocks] == [False, False, True]
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_available, pool.num_used) == (1, 2, 3, 0)
    assert pool.count_unreferenced(blocks) == 2
    pool.share(blocks[:1])
    assert (pool.num_cached, pool.num_used) == (1, 1)
    assert pool.allocate(2) == [blocks[2], blocks[1]], "free blocks go first"
    assert evicted == [blocks[1]]
    assert pool.is_private(blocks[1])
    pool.check_integrity()


def test_the_least_recently_used_goes_first_and_a_chain_loses_its_tail_first() -> None:
    pool, evicted = BlockPool(4), []
    pool.on_evict = evicted.append
    blocks = pool.allocate(4)
    for block in blocks:
        pool.keep(block)
    pool.release(blocks)
    pool.share(blocks[:2])
    pool.release(blocks[:2])
    pool.allocate(4)
    assert evicted == [blocks[3], blocks[2], blocks[1], blocks[0]]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.allocate(5), "5 blocks asked, 3 available"),
        (lambda pool: pool.release([3]), "not used"),
        (lambda pool: pool.share([3]), "neither used nor cached"),
        (lambda pool: pool.prove([0]), "not in quarantine"),
        (lambda pool: pool.release([0], [1]), "not released"),
        (lambda pool: (pool.share([0]), pool.release([0], [0])), "open write window"),
        (lambda pool: (pool.keep(0), pool.release([0], [0])), "open write window and kept"),
        (lambda pool: pool.keep(3), "kept but not used"),
    ],
)
def test_misuse_is_caught(misuse, message: str) -> None:
    pool = BlockPool(4)
    assert pool.allocate(1) == [0]
    with pytest.raises(AssertionError, match=message):
        misuse(pool)


def test_integrity_finds_a_lost_and_a_doubled_block() -> None:
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()
    pool._free += [0, 0]
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()
