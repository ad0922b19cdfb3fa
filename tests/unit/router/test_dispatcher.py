"""Placement, refusals, retries, gaps and deadlines, with scripted workers and a clock that the test moves."""

import pytest

from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.errors import ApiError
from router.inbox import Inbox
from router.retry import Spent
from router.stream import Deadlines, Finished, LiveStream, Marks, Standing, StreamFault
from router.worker_view import WorkerSnapshot
from workers.protocol import (
    Abort,
    Accept,
    Busy,
    ComputedPrompt,
    DecodeTimings,
    Delta,
    DownMessage,
    End,
    Failed,
    FailReason,
    Generate,
    Load,
    Position,
    Prefill,
    PrefillEnd,
    PrefillTimings,
    Resume,
    Role,
    SamplingParams,
    Seen,
    Tokens,
    WorkerIdentity,
)

PREFILL, DECODE, PREFILL_2 = 1, 2, 3


class StubLink:
    def __init__(self, incarnation: int, role: Role, free: int = 100) -> None:
        self.incarnation, self.role, self.free = incarnation, role, free
        self.is_listed = self.is_up = True
        self.is_refusing = False
        self.sent: list[DownMessage] = []
        self.lanes: tuple[int, ...] = (PREFILL, PREFILL_2)

    def snapshot(self) -> WorkerSnapshot:
        identity = WorkerIdentity(self.incarnation, self.role, "m", "d", 1, 1, 16, 100, 1600, 4, 1)
        load = Load("ready", 1 << 30, 100, self.free, 0, 0, 0, 0, 0, self.lanes, ComputedPrompt())
        return WorkerSnapshot(
            self.incarnation, self.role, identity, load if self.is_up else None, True, False, self.is_refusing
        )

    def next_dispatch(self, blocks: int, prompt_tokens: int) -> int:
        return len(self.sent) + 1

    def refuse_until_load(self) -> None:
        self.is_refusing = True

    def send(self, message: DownMessage) -> None:
        self.sent.append(message)

    def take(self) -> list[DownMessage]:
        sent, self.sent = self.sent, []
        return sent


class Bench:
    """One ingress's judge between stub links."""

    def __init__(self, *, prefills: int = 1, **config: object) -> None:
        self.now = 100.0
        settings = RouterConfig(model_id="m", model_path="", **config)  # type: ignore[arg-type]
        self.desk = Dispatcher(settings, lambda: self.now, lambda: 0.0)
        self.inbox = Inbox(self.desk, lambda: self.now)
        self.prefill, self.decode = StubLink(PREFILL, "prefill"), StubLink(DECODE, "decode")
        self.prefill_2 = StubLink(PREFILL_2, "prefill")
        for link in (self.prefill, self.decode, self.prefill_2)[: prefills + 1]:
            self.desk.add_link(link)
        self.count = 0

    def submit(self, num_prompt: int = 20, **standing: object) -> LiveStream:
        self.count += 1
        deadlines = Deadlines(self.now + 60, 30, None)
        stream = LiveStream(
            [7] * num_prompt, SamplingParams(max_tokens=8), deadlines, Marks(self.now), self.count,
            standing=Standing(**standing),  # type: ignore[arg-type]
        )  # fmt: skip
        self.desk.submit(stream)
        return stream

    def accept(self, link: StubLink, stream: LiveStream, cached: int = 0) -> None:
        self.inbox.on_message(link, Accept(stream.id, stream.attempt, 0, cached))

    def computing(self) -> LiveStream:
        stream = self.submit()
        self.accept(self.decode, stream)
        self.accept(self.prefill, stream)
        assert stream.state == "computing"
        self.prefill.take()
        self.decode.take()
        return stream

    def tokens(self, stream: LiveStream, position: int, *tokens: int) -> None:
        self.inbox.on_message(self.decode, Tokens((Delta(stream.id, stream.attempt, position, tokens),)))

    def end(self, stream: LiveStream, count: int) -> None:
        self.inbox.on_message(self.decode, End(stream.id, stream.attempt, count, "stop", DecodeTimings()))

    def failed(self, link: StubLink, stream: LiveStream, reason: str) -> None:
        self.inbox.on_message(link, Failed(stream.id, stream.attempt, "decode", reason))  # type: ignore[arg-type]

    def load(self, link: StubLink) -> None:
        link.is_refusing = False
        self.inbox.on_message(link, link.snapshot().load)  # type: ignore[arg-type]


def code_of(stream: LiveStream) -> str | None:
    return stream.outcome.code if isinstance(stream.outcome, ApiError) else None


def test_grant_goes_to_decode_first_and_to_prefill_after_its_accept() -> None:
    bench = Bench()
    stream = bench.submit()
    (generate,) = bench.decode.take()
    assert isinstance(generate, Generate)
    assert (generate.source, generate.local, generate.attempt) == (PREFILL, "none", 0)
    assert bench.prefill.sent == []
    bench.accept(bench.decode, stream)
    (prefill,) = bench.prefill.take()
    assert isinstance(prefill, Prefill)
    assert prefill.decode == DECODE
    assert prefill.prompt == generate.prompt
    bench.accept(bench.prefill, stream, cached=16)
    assert (stream.state, stream.num_cached) == ("computing", 16)


def test_a_whole_stream_is_seen_and_finished_once() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.tokens(stream, 0, 5, 6)
    bench.inbox.on_message(bench.prefill, PrefillEnd(stream.id, 0, PrefillTimings()))
    bench.tokens(stream, 2, 7)
    bench.end(stream, 3)
    assert stream.tokens == [5, 6, 7]
    assert stream.outcome == Finished("stop")
    assert bench.decode.take() == [Seen(stream.id, 0)]
    assert bench.prefill.take() == [Seen(stream.id, 0)]
    bench.end(stream, 3)  # sent again after a RESUME
    assert bench.decode.take() == [Seen(stream.id, 0)]


def test_tokens_may_overtake_prefills_accept() -> None:
    bench = Bench()
    stream = bench.submit()
    bench.accept(bench.decode, stream)
    bench.tokens(stream, 0, 5)
    bench.accept(bench.prefill, stream, cached=3)
    assert (stream.state, stream.num_cached, stream.tokens) == ("decoding", 3, [5])


def test_a_decode_refusal_waits_for_its_next_load_at_the_head() -> None:
    bench = Bench()
    first = bench.submit()
    second = bench.submit()
    bench.decode.take()
    bench.inbox.on_message(bench.decode, Busy(first.id, 0, "blocks"))
    assert (first.state, first.attempt) == ("queued", 1)
    assert bench.desk.queue.head() is first
    assert bench.desk.queue.count_by_label() == {"decode_blocks": 1}
    assert bench.decode.take() == []  # it refused: no ABORT is owed and nothing new goes there
    third = bench.submit()
    assert bench.decode.take() == []
    bench.load(bench.decode)
    assert [(m.stream, m.attempt) for m in bench.decode.take() if isinstance(m, Generate)] == [
        (first.id, 1),
        (third.id, 0),
    ]
    assert second.state == "reserving"


def test_a_prefill_refusal_gives_decodes_reservation_back_at_once() -> None:
    bench = Bench()
    stream = bench.submit()
    bench.accept(bench.decode, stream)
    bench.decode.take()
    bench.inbox.on_message(bench.prefill, Busy(stream.id, 0, "prefill_time"))
    assert bench.decode.take() == [Abort(stream.id, 0, "retry")]
    assert bench.desk.queue.count_by_label() == {"prefill_time": 1}
    bench.load(bench.prefill)
    assert isinstance(bench.decode.take()[0], Generate)


def test_stale_attempts_are_dropped() -> None:
    bench = Bench()
    stream = bench.submit()
    bench.inbox.on_message(bench.decode, Busy(stream.id, 0, "blocks"))
    bench.load(bench.decode)
    assert stream.attempt == 1
    bench.inbox.on_message(bench.decode, Accept(stream.id, 0, 0, 0))
    bench.inbox.on_message(bench.decode, Tokens((Delta(stream.id, 0, 0, (9,)),)))
    bench.inbox.on_message(bench.decode, Failed(stream.id, 0, "decode", "internal"))
    assert (stream.state, stream.tokens, stream.spent.crashes) == ("reserving", [], 0)


def test_a_gap_is_asked_for_once_and_an_overlap_is_cut() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.tokens(stream, 0, 5)
    bench.tokens(stream, 2, 7)
    bench.tokens(stream, 3, 8)
    assert bench.decode.take() == [Resume((Position(stream.id, 0, 1),), complete=False)]
    bench.tokens(stream, 0, 5, 6, 7, 8)
    assert stream.tokens == [5, 6, 7, 8]
    bench.now += 2
    bench.desk.tick()
    assert bench.decode.take() == []


def test_an_end_ahead_of_its_tokens_waits_for_them() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.tokens(stream, 0, 5)
    bench.end(stream, 3)
    assert stream.outcome is None
    assert bench.decode.take() == [Resume((Position(stream.id, 0, 1),), complete=False)]
    bench.now += 1.5
    bench.desk.tick()  # its answer was lost
    assert bench.decode.take() == [Resume((Position(stream.id, 0, 1),), complete=False)]
    bench.tokens(stream, 1, 6, 7)
    assert (stream.outcome, stream.tokens) == (Finished("stop"), [5, 6, 7])


def test_leaving_aborts_both_sides_once() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.desk.leave(stream, "disconnect")
    bench.desk.leave(stream, "disconnect")
    assert bench.decode.take() == [Abort(stream.id, 0, "disconnect")]
    assert bench.prefill.take() == [Abort(stream.id, 0, "disconnect")]
    assert bench.desk.num_open == 0
    bench.tokens(stream, 0, 5)
    assert stream.tokens == []


def test_leaving_the_queue_says_nothing_to_workers() -> None:
    bench = Bench()
    bench.decode.is_up = False
    stream = bench.submit()
    bench.desk.leave(stream, "disconnect")
    assert (bench.decode.sent, bench.prefill.sent, len(bench.desk.queue)) == ([], [], 0)


def test_a_failed_transfer_goes_to_another_prefill() -> None:
    bench = Bench(prefills=2)
    stream = bench.computing()
    bench.failed(bench.decode, stream, "transfer")
    generate = bench.decode.take()[-1]
    assert isinstance(generate, Generate)
    assert (generate.source, generate.attempt) == (PREFILL_2, 1)
    assert bench.prefill.take() == [Abort(stream.id, 0, "retry")]


def test_a_failed_transfer_without_another_prefill_is_computed_on_decode() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.failed(bench.decode, stream, "peer_lost")
    generate = bench.decode.take()[-1]
    assert isinstance(generate, Generate)
    assert (generate.source, generate.local) == (0, "fallback")
    bench.accept(bench.decode, stream)
    assert stream.state == "computing"
    bench.tokens(stream, 0, 5)
    assert stream.tokens == [5]


def test_without_fallback_the_transfer_budget_ends_the_request() -> None:
    bench = Bench(local_fallback=False)
    stream = bench.computing()
    for attempt in range(3):
        assert (stream.attempt, stream.outcome) == (attempt, None)
        bench.failed(bench.decode, stream, "transfer")
        bench.accept(bench.decode, stream)
        bench.accept(bench.prefill, stream)
    assert code_of(stream) == "worker_lost"


def test_two_crashes_end_the_request() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.failed(bench.decode, stream, "internal")
    assert stream.attempt == 1
    bench.failed(bench.decode, stream, "internal")
    assert code_of(stream) == "internal_error"


def test_invalid_is_final_and_the_clients_fault() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.failed(bench.decode, stream, "invalid")
    assert isinstance(stream.outcome, ApiError)
    assert stream.outcome.status == 400
    message = stream.outcome.message  # type: ignore[union-attr]
    assert "20 tokens" in message
    assert "hold 1600" in message


def test_tenant_and_priority_travel_to_both_workers() -> None:
    bench = Bench()
    stream = bench.submit(priority=3, tenant=b"t" * 32)
    (generate,) = bench.decode.take()
    bench.accept(bench.decode, stream)
    (prefill,) = bench.prefill.take()
    for message in (generate, prefill):
        assert (message.tenant, message.priority) == (b"t" * 32, 3)  # type: ignore[union-attr]
        assert message.waited_ms == 3 * 8000  # type: ignore[union-attr]


def test_priority_counts_as_waiting_in_the_queue() -> None:
    bench = Bench()
    bench.decode.is_refusing = True
    ordinary = bench.submit()
    bench.now += 7.0
    urgent, lazy = bench.submit(priority=1), bench.submit(priority=-1)
    assert bench.desk.queue.head() is urgent
    bench.now += 9.5
    late = bench.submit()
    bench.now += 7.0
    urgent_but_late = bench.submit(priority=1)
    assert [bench.desk.queue._waiting.index(s) for s in (urgent, ordinary, lazy, urgent_but_late, late)] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert lazy.waited_s(bench.now) == 16.5 - 8


def test_names_of_a_stream_follow_tenant_and_block_size() -> None:
    bench = Bench()
    stream, other = bench.submit(33), bench.submit(33, tenant=b"t")
    assert [len(stream.names(n)) for n in (16, 32, 33, 64)] == [2, 1, 0, 0]
    assert stream.names(16) is stream.names(16)
    assert set(stream.names(16)).isdisjoint(other.names(16))


def test_after_the_first_token_a_lost_worker_ends_the_answer() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.tokens(stream, 0, 5)
    bench.decode.is_up = False
    bench.inbox.on_broken(bench.decode)
    assert stream.outcome is None  # the worker may be dialled again
    bench.inbox.on_lost(bench.decode)
    assert code_of(stream) == "worker_lost"


def test_a_lost_decode_before_the_first_token_is_waited_for() -> None:
    bench = Bench()
    stream = bench.computing()
    bench.decode.is_up = False
    bench.inbox.on_broken(bench.decode)
    bench.inbox.on_lost(bench.decode)
    assert (stream.state, stream.attempt) == ("queued", 1)
    assert bench.desk.queue.count_by_label() == {"no_decode_worker": 1}
    bench.decode.is_up = True
    bench.load(bench.decode)
    assert stream.state == "reserving"


def test_whole_reservations_resume_and_half_ones_start_again() -> None:
    bench = Bench()
    whole, half = bench.computing(), bench.submit()
    bench.tokens(whole, 0, 5)
    bench.decode.is_up = False
    bench.inbox.on_broken(bench.decode)
    assert (half.state, half.attempt) == ("queued", 1)
    assert bench.inbox.positions(bench.decode) == (Position(whole.id, 0, 1),)


def test_prefills_lost_link_is_no_verdict_for_three_seconds() -> None:
    bench = Bench(prefills=2)
    stream = bench.computing()
    bench.prefill.is_up = False
    bench.inbox.on_broken(bench.prefill)
    bench.now += 2.9
    bench.desk.tick()
    assert stream.state == "computing"
    bench.now += 0.2
    bench.desk.tick()
    assert (stream.state, stream.attempt) == ("reserving", 1)


@pytest.mark.parametrize("recovery", ["token", "redial"])
def test_prefills_lost_link_is_forgotten_when_the_stream_goes_on(recovery: str) -> None:
    bench = Bench()
    stream = bench.computing()
    bench.inbox.on_broken(bench.prefill)
    if recovery == "token":
        bench.tokens(stream, 0, 5)
    else:
        assert bench.inbox.positions(bench.prefill) == (Position(stream.id, 0, 0),)
        bench.inbox.on_up(bench.prefill)
    bench.now += 5
    bench.desk.tick()
    assert (stream.attempt, stream.outcome) == (0, None)


def test_deadlines_end_streams_and_abort_the_work() -> None:
    bench = Bench()
    waiting, flowing = bench.computing(), bench.computing()
    bench.tokens(flowing, 0, 5)
    bench.now += 30.5
    bench.desk.tick()
    assert (code_of(waiting), code_of(flowing)) == (None, "progress_deadline")
    assert bench.decode.take() == [Abort(flowing.id, 0, "deadline")]
    bench.now += 30
    bench.desk.tick()
    assert code_of(waiting) == "first_token_deadline"
    assert bench.prefill.take()[-1] == Abort(waiting.id, 0, "deadline")


def test_a_queued_request_ends_at_its_first_token_deadline() -> None:
    bench = Bench()
    bench.prefill.is_up = False
    stream = bench.submit()
    bench.now += 61
    bench.desk.tick()
    assert (code_of(stream), len(bench.desk.queue)) == ("first_token_deadline", 0)


def test_ending_all_ends_queued_and_running_streams() -> None:
    bench = Bench()
    running = bench.computing()
    bench.decode.free = 0
    queued = bench.submit()
    bench.desk.end_all(ApiError("shutting_down", "bye"))
    assert (code_of(running), code_of(queued)) == ("shutting_down", "shutting_down")
    assert bench.decode.take() == [Abort(running.id, 0, "shutdown")]


def test_colocated_workers_get_one_local_generate() -> None:
    bench = Bench(disaggregation="never")
    bench.desk.add_link(colocated := StubLink(9, "colocated"))
    stream = bench.submit()
    (generate,) = colocated.take()
    assert isinstance(generate, Generate)
    assert (generate.source, generate.local) == (0, "local")
    bench.accept(colocated, stream, cached=4)
    assert (stream.state, stream.num_cached) == ("computing", 4)


def test_a_request_that_fits_no_pool_does_not_block_the_queue() -> None:
    bench = Bench()
    stream = bench.submit(num_prompt=5000)
    assert code_of(stream) == "context_length_exceeded"


def test_an_unknown_transition_tells_the_story() -> None:
    stream = Bench().submit()
    with pytest.raises(StreamFault, match="queued\\+dispatch#0"):
        stream.advance("dispatch")


@pytest.mark.parametrize("decode_word", ["transfer", "peer_lost", None])
def test_a_drain_of_prefill_costs_nothing(decode_word: FailReason | None) -> None:
    """The prefill worker leaves in the middle of a prompt: decode's word on the transfer is no failed transfer then."""
    bench = Bench(prefills=2)
    stream = bench.computing()
    bench.failed(bench.prefill, stream, "draining")
    if decode_word is None:
        bench.now += 3.1
        bench.desk.tick()
    else:
        bench.failed(bench.decode, stream, decode_word)
    assert stream.attempt == 1
    assert stream.spent == Spent()
    assert not stream.needs_local
