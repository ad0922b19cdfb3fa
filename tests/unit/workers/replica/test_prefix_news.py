"""What each ingress hears of the prefix cache, and when."""

from tests.unit.workers.engine.test_prefix_cache import Rig, chain_of
from workers.protocol import MAX_NAMES, Cache, unpack_names
from workers.replica.prefix_news import PERIOD_S, PrefixNews


class Listener:
    """An ingress that adds up what it hears."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def hear(self, frames: list[Cache]) -> None:
        for frame in frames:
            if frame.is_whole:
                self.names.clear()
            assert len(frame.added) + len(frame.removed) <= 2 * 16 * MAX_NAMES
            self.names.difference_update(unpack_names(frame.removed))
            self.names.update(unpack_names(frame.added))


def test_changes_go_to_whoever_knows_the_rest_and_everything_to_who_is_new() -> None:
    rig, one, two = Rig(num_blocks=4), Listener(), Listener()
    news = PrefixNews(rig.cache)
    first, second = chain_of(list(range(8))), chain_of(list(range(50, 62)))
    rig.finish(rig.compute(first))
    frames = news.take({1}, 1.0)
    assert [frame.is_whole for frame in frames[1]] == [True]
    one.hear(frames[1])
    rig.finish(rig.compute(second))
    assert news.take({1, 2}, 1.0 + PERIOD_S / 2) == {}
    frames = news.take({1, 2}, 1.0 + PERIOD_S)
    assert ([f.is_whole for f in frames[1]], [f.is_whole for f in frames[2]]) == ([False], [True])
    one.hear(frames[1])
    two.hear(frames[2])
    assert one.names == two.names == set(rig.cache.published())
    assert news.take({1, 2}, 9.0) == {}, "nothing changed"
    news.start_over(2)
    assert [f.is_whole for f in news.take({1, 2}, 10.0)[2]] == [True]
    assert set(news.take({2}, 11.0)) == set()
    assert set(news.take({1, 2}, 12.0)) == {1}, "it was gone meanwhile"


def test_frames_are_bounded() -> None:
    rig, listener = Rig(num_blocks=2 * MAX_NAMES + 7), Listener()
    news = PrefixNews(rig.cache)
    chain = chain_of([i % 251 for i in range(4 * (2 * MAX_NAMES + 7))])
    rig.finish(rig.compute(chain))
    frames = news.take({1}, 0.0)[1]
    assert [frame.is_whole for frame in frames] == [True, False, False]
    listener.hear(frames)
    assert listener.names == set(chain)
    other = chain_of([i % 249 for i in range(4 * MAX_NAMES)])
    rig.finish(rig.compute(other))
    listener.hear(news.take({1}, 1.0)[1])
    assert listener.names == set(rig.cache.published())
