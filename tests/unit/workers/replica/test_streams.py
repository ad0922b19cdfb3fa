from workers.protocol import Accept, Delta, Failed, Position, Resume, StreamKey, Tokens
from workers.replica.streams import INGRESS_GRACE_S, RETENTION_S, Attempt, StreamTable

S, T = b"s" * 16, b"t" * 16


def attempt(stream: bytes = S, number: int = 0, *, ingress: int = 7, base: int = 0, deadline: float = 100.0) -> Attempt:
    return Attempt(StreamKey(stream, number), ingress, base, deadline, 30.0, Accept(stream, number, 0, 0))


def table_with(*attempts: Attempt) -> StreamTable:
    table = StreamTable("decode")
    for one in attempts:
        table.add(one)
    return table


def test_attempts_fence_each_other() -> None:
    table = table_with(attempt(number=3))
    assert table.is_stale(StreamKey(S, 2))
    assert not table.is_stale(StreamKey(S, 3))
    assert table.older_than(StreamKey(S, 4)) is not None
    assert table.older_than(StreamKey(S, 3)) is None
    assert table.get(StreamKey(S, 2)) is None
    assert table.remove(StreamKey(S, 2)) is None
    assert table.remove(StreamKey(S, 3)) is not None
    assert not table.is_stale(StreamKey(S, 0))


def test_there_is_one_terminal_answer() -> None:
    table = table_with(attempt())
    first, second = Failed(S, 0, "decode", "deadline"), Failed(S, 0, "decode", "internal")
    assert table.finish(StreamKey(S, 0), first, 1.0) is not None
    assert table.finish(StreamKey(S, 0), second, 1.0) is None
    assert table.live() == []


def test_resume_repeats_from_the_count_and_the_end_after_it() -> None:
    one = attempt(base=2)
    one.outputs = [10, 11, 12]
    table = table_with(one)
    end = Failed(S, 0, "decode", "draining")
    table.finish(one.key, end, 1.0)
    doomed, answers = table.resume(7, Resume((Position(S, 0, 3),), complete=False))
    assert doomed == []
    assert answers == [one.accept, Tokens((Delta(S, 0, 3, (11, 12)),)), end]


def test_resume_of_a_whole_view_aborts_the_rest_of_that_ingress_only() -> None:
    mine, other = attempt(S, ingress=7), attempt(T, ingress=8)
    table = table_with(mine, other)
    doomed, answers = table.resume(7, Resume((), complete=True))
    assert doomed == [mine]
    assert answers == []


def test_resume_answers_unknown_for_what_is_not_here() -> None:
    table = table_with(attempt(S, 1))
    _, answers = table.resume(7, Resume((Position(S, 0, 0), Position(T, 0, 5)), complete=True))
    assert answers == [Failed(S, 0, "decode", "unknown"), Failed(T, 0, "decode", "unknown")]


def test_resume_with_nothing_new_sends_no_empty_delta() -> None:
    one = attempt()
    one.outputs = [1]
    _, answers = table_with(one).resume(7, Resume((Position(S, 0, 1),), complete=True))
    assert answers == [one.accept]


def test_an_ingress_is_missed_for_the_grace_time() -> None:
    one = attempt()
    table = table_with(one)
    table.link_down(7, 10.0)
    assert table.orphans(10.0 + INGRESS_GRACE_S - 0.01) == []
    table.link_up(7)
    assert table.orphans(100.0) == []
    table.link_down(7, 200.0)
    assert table.orphans(200.0 + INGRESS_GRACE_S) == [one]
    assert table.orphans(300.0) == []


def test_deadlines_concern_the_living() -> None:
    one, two = attempt(S, deadline=5.0), attempt(T, deadline=6.0)
    table = table_with(one, two)
    assert table.overdue(4.9) == []
    assert table.overdue(5.5) == [one]
    table.finish(one.key, Failed(S, 0, "decode", "deadline"), 5.5)
    assert table.overdue(6.5) == [two]


def test_an_ended_attempt_is_forgotten_when_seen_never_comes() -> None:
    table = table_with(attempt())
    table.finish(StreamKey(S, 0), Failed(S, 0, "decode", "deadline"), 5.0)
    table.forget_old(5.0 + RETENTION_S - 1)
    assert table.get(StreamKey(S, 0)) is not None
    table.forget_old(5.0 + RETENTION_S + 1)
    assert table.get(StreamKey(S, 0)) is None


def test_delta_never_reaches_below_the_attempt_s_base() -> None:
    one = attempt(base=4)
    one.outputs = [1, 2]
    assert one.delta(0) == Delta(S, 0, 4, (1, 2))
    assert one.delta(5) == Delta(S, 0, 5, (2,))
    assert isinstance(one.accept, Accept)
