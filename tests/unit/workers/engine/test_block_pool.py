"""Each block is free, used or quarantined, and misuse is an assertion."""

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


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.allocate(5), "5 blocks asked, 3 free"),
        (lambda pool: pool.release([3]), "not used"),
        (lambda pool: pool.share([3]), "not used"),
        (lambda pool: pool.prove([0]), "not in quarantine"),
        (lambda pool: pool.release([0], [1]), "not released"),
        (lambda pool: (pool.share([0]), pool.release([0], [0])), "open write window"),
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
