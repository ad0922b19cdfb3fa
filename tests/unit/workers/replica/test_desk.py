"""The front office: fences, answers and order, with a fake clock."""

import json

import pytest

from workers.protocol import Accept, Busy, Delta, Explain, Failed, Generate, Resume, SamplingParams, StreamKey, Tokens
from workers.replica.desk import EXPLAIN_BYTES, Desk
from workers.replica.lifecycle import Lifecycle

S, T = b"s" * 16, b"t" * 16
INGRESS = 7


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def desk(clock: Clock) -> Desk:
    lifecycle = Lifecycle()
    lifecycle.become("ready")
    return Desk("decode", "decode", lifecycle, clock)


def generate(stream: bytes = S, attempt: int = 0, waited_ms: int = 0, dispatch: int = 1) -> Generate:
    return Generate(stream, attempt, dispatch, waited_ms, 5, "none", b"", b"", SamplingParams(), 1000, 500)


def test_asked_again_the_answer_is_the_same(desk: Desk) -> None:
    assert desk.arrives(INGRESS, generate())
    desk.accept(INGRESS, generate(), 0)
    assert not desk.arrives(INGRESS, generate(dispatch=9))
    assert desk.take_outbox() == {INGRESS: [Accept(S, 0, 0, 0), Accept(S, 0, 0, 0)]}
    assert desk.dispatches == {INGRESS: 9}


def test_a_stale_attempt_is_dropped_without_an_answer(desk: Desk) -> None:
    desk.accept(INGRESS, generate(attempt=2), 0)
    desk.take_outbox()
    assert not desk.arrives(INGRESS, generate(attempt=1))
    assert desk.take_outbox() == {}


def test_tokens_of_a_step_share_one_message_and_renew_the_deadline(desk: Desk, clock: Clock) -> None:
    for stream in (S, T):
        desk.accept(INGRESS, generate(stream), 0)
    desk.take_outbox()
    clock.now = 100.9
    desk.token(StreamKey(S, 0), 0, 11)
    desk.token(StreamKey(T, 0), 0, 12)
    assert desk.take_outbox() == {INGRESS: [Tokens((Delta(S, 0, 0, (11,)), Delta(T, 0, 0, (12,))))]}
    assert desk.streams.overdue(101.3) == []
    assert len(desk.streams.overdue(101.5)) == 2


def test_a_gap_in_the_engine_s_tokens_is_an_invariant_broken(desk: Desk) -> None:
    desk.accept(INGRESS, generate(), 0)
    with pytest.raises(AssertionError):
        desk.token(StreamKey(S, 0), 1, 11)


def test_tokens_and_ends_of_unknown_attempts_say_nothing(desk: Desk) -> None:
    desk.token(StreamKey(S, 0), 0, 11)
    desk.fail(StreamKey(S, 0), "internal")
    assert desk.take_outbox() == {}


def test_a_draining_worker_says_so(desk: Desk) -> None:
    desk.lifecycle.become("draining")
    assert desk.hindrance(generate()) == "draining"
    desk.refuse(INGRESS, generate(), "draining")
    assert desk.take_outbox() == {INGRESS: [Busy(S, 0, "draining")]}


def test_refused_for_room_is_remembered_refused_for_draining_is_not(desk: Desk, clock: Clock) -> None:
    desk.refuse(INGRESS, generate(S, waited_ms=900), "draining")
    desk.accept(INGRESS, generate(T), 0)
    desk.refuse(INGRESS, generate(S, waited_ms=900), "blocks")
    desk.accept(INGRESS, generate(b"u" * 16), 0)
    clock.now += 0.9
    desk.refuse(INGRESS, generate(S, waited_ms=1800), "blocks")
    assert desk.hindrance(generate(b"v" * 16)) is None
    clock.now += 0.2
    assert desk.hindrance(generate(b"v" * 16)) == "behind_older"
    assert desk.hindrance(generate(S, waited_ms=2000)) is None


def test_facts_that_do_not_fit_are_dropped(desk: Desk) -> None:
    desk.accept(INGRESS, generate(), 0)
    desk.take_outbox()
    desk.explain(StreamKey(S, 0), lambda d: json.dumps(d).encode(), {"x": "y" * EXPLAIN_BYTES})
    assert desk.take_outbox() == {}
    desk.explain(StreamKey(S, 0), lambda d: json.dumps(d).encode(), {"x": 1})
    assert desk.take_outbox() == {INGRESS: [Explain(S, 0, "decode", b'{"x": 1}')]}


def test_resume_is_answered_through_the_outbox(desk: Desk) -> None:
    desk.accept(INGRESS, generate(), 0)
    desk.take_outbox()
    doomed = desk.resume(INGRESS, Resume((), complete=True))
    assert [a.key for a in doomed] == [StreamKey(S, 0)]
    desk.fail(StreamKey(S, 0), "draining")
    assert desk.take_outbox() == {INGRESS: [Failed(S, 0, "decode", "draining")]}
