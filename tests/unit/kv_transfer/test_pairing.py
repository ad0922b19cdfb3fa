"""Rendezvous hashing: bounded, even, and stable when the pool changes."""

import random
from collections import Counter

from kv_transfer.events import KVSource
from kv_transfer.pairing import PAIRS_MAX, choose_sources


def make_sources(count: int, seed: int = 0) -> list[KVSource]:
    draw = random.Random(seed)
    return [KVSource(draw.getrandbits(63), "127.0.0.1", 4000 + index) for index in range(count)]


def test_a_small_pool_is_taken_whole():
    sources = make_sources(PAIRS_MAX)
    assert set(choose_sources(7, sources)) == set(sources)


def test_the_order_of_the_list_does_not_matter():
    sources = make_sources(40)
    assert choose_sources(7, sources) == choose_sources(7, sources[::-1])


def test_a_source_that_leaves_changes_one_pair_at_most():
    sources = make_sources(40)
    for own in range(20):
        before = set(choose_sources(own, sources))
        for gone in sources:
            left = set(choose_sources(own, [source for source in sources if source != gone]))
            assert len(before - left) == (gone in before)


def test_pairs_spread_evenly():
    sources = make_sources(64)
    draw = random.Random(1)
    load = Counter(s.incarnation for _ in range(256) for s in choose_sources(draw.getrandbits(63), sources))
    mean = 256 * PAIRS_MAX / 64
    assert len(load) == 64
    assert 0.5 * mean < min(load.values()) <= max(load.values()) < 1.6 * mean
