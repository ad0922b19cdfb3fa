"""The queue's far side: puts waiting streams on workers and turns messages into progress or another attempt.

Grant first: GENERATE to decode, ACCEPT, then PREFILL to prefill. Any refusal gives the other reservation back at once.
Synchronous but for one wait, with an injected clock; every method belongs to the ingress's event loop. It is the only
judge: workers report and stop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, assert_never

from router.admission import ArrivalQueue
from router.config import RouterConfig
from router.errors import ApiError
from router.grant import make_generate, make_prefill
from router.retry import Budgets, Failure, Retry, Situation, decide_retry
from router.stream import Finished, LiveStream, Placement, Verdict
from router.worker_view import Need, Route, Wait, WaitLabel, WorkerSnapshot, decide_route
from workers.protocol import (
    Abort,
    AbortReason,
    Accept,
    Busy,
    Delta,
    DownMessage,
    End,
    Explain,
    Failed,
    FailReason,
    Heartbeat,
    Load,
    LocalReason,
    Position,
    PrefillEnd,
    Resume,
    Role,
    Seen,
    Tokens,
    UpMessage,
)

logger = logging.getLogger(__name__)
_ABORT_REASONS: dict[Failure, AbortReason] = {
    "first_token_deadline": "deadline",
    "progress_deadline": "deadline",
    "total_deadline": "deadline",
}


class Link(Protocol):
    """What the dispatcher asks of a link."""

    is_listed: bool

    @property
    def incarnation(self) -> int: ...

    @property
    def is_up(self) -> bool: ...

    def snapshot(self) -> WorkerSnapshot: ...

    def next_dispatch(self, blocks: int, prompt_tokens: int) -> int: ...

    def refuse_until_load(self) -> None: ...

    def send(self, message: DownMessage) -> None: ...


def _find_failure(reason: FailReason, has_tokens: bool) -> Failure:
    match reason:
        case "transfer" | "peer_lost":
            return "transfer"
        case "deadline":
            return "progress_deadline" if has_tokens else "first_token_deadline"
        case "invalid" | "draining" | "unknown" | "internal":
            return reason
        case _ as never:
            assert_never(never)


class Dispatcher:
    def __init__(self, config: RouterConfig, clock: Callable[[], float], draw: Callable[[], float]) -> None:
        self._config, self._clock, self._draw = config, clock, draw
        self._budgets = Budgets(config.max_failed_transfers, config.max_crash_charges)
        self._links: dict[int, Link] = {}
        self._streams: dict[bytes, LiveStream] = {}
        self.queue: ArrivalQueue[LiveStream] = ArrivalQueue()
        self._emptied = asyncio.Event()

    # --- the ingress's side -----------------------------------------------------------------------------------------

    def submit(self, stream: LiveStream) -> None:
        """Takes a new stream; it is placed at once where there is room."""
        self._streams[stream.id] = stream
        stream.marks.queued = self._clock()
        self.queue.push(stream)
        self.pump()

    def leave(self, stream: LiveStream, reason: AbortReason) -> None:
        """The consumer is gone: aborts what still runs on both links and forgets the stream. Idempotent."""
        if stream.state != "done":
            self._abort_attempt(stream, reason)
            self.queue.remove(stream)
            stream.finish(ApiError("internal", "The request was given up."), self._clock())
        if self._streams.pop(stream.id, None) is not None:
            self._emptied.set()
            self.pump()

    async def wait_empty(self) -> None:
        """Returns when every consumer has left. Cancel-safe."""
        while self._streams:
            self._emptied.clear()
            await self._emptied.wait()

    def end_all(self, error: ApiError) -> None:
        """Every open stream ends with `error`; its work is aborted."""
        for stream in self._open_streams():
            self._end(stream, error, "shutdown")

    def add_link(self, link: Link) -> None:
        self._links[link.incarnation] = link

    def drop_link(self, link: Link) -> None:
        if self._links.get(link.incarnation) is link:
            del self._links[link.incarnation]

    def snapshots(self) -> list[WorkerSnapshot]:
        return [link.snapshot() for link in self._links.values()]

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def pump(self) -> None:
        """Places the queue's head while there is room for it, in order of arrival."""
        while (stream := self.queue.head()) is not None:
            route = decide_route(self.snapshots(), self._need(stream), self._config.disaggregation, self._draw)
            if isinstance(route, Wait):
                self.queue.label = route.label
                return
            self.queue.remove(stream)
            self._dispatch(stream, route)

    def tick(self) -> None:
        """Enforces deadlines and awaited verdicts; call about ten times a second."""
        now = self._clock()
        for stream in self._open_streams():
            failure = self._find_overdue(stream, now)
            if failure is not None:
                self._fail(stream, failure, blames_prefill=failure in {"prefill_lost", "transfer"})
            elif stream.is_missing_tokens:
                self._ask_again(stream)
        self.pump()

    # --- the links' side (link.LinkOwner) ---------------------------------------------------------------------------

    def positions(self, link: Link) -> tuple[Position, ...]:
        """Streams whose reservations are whole go on over a new connection; the worker aborts all else."""
        found = []
        for stream in self._open_streams():
            if stream.state in ("computing", "decoding") and stream.placement.decode == link.incarnation:
                found.append(Position(stream.id, stream.attempt, len(stream.tokens)))
            elif stream.placement.prefill == link.incarnation and stream.placement.is_prefill_open:
                found.append(Position(stream.id, stream.attempt, 0))
        return tuple(found)

    def on_up(self, link: Link) -> None:
        for stream in self._open_streams():
            if (
                stream.placement.prefill == link.incarnation
                and stream.verdict
                and stream.verdict.failure == "prefill_lost"
            ):
                stream.verdict = None

    def on_broken(self, link: Link) -> None:
        for stream in self._open_streams():
            if stream.placement.decode == link.incarnation and stream.state in ("reserving", "offering"):
                self._fail(stream, "unknown")
            elif stream.placement.prefill == link.incarnation and stream.state == "offering":
                self._fail(stream, "prefill_lost", blames_prefill=True)
            elif stream.placement.prefill == link.incarnation and stream.state == "computing":
                self._await_verdict(stream, "prefill_lost")
        self.pump()

    def on_lost(self, link: Link) -> None:
        for stream in self._open_streams():
            if stream.placement.decode == link.incarnation and stream.state != "queued":
                self._fail(stream, "decode_lost")
        self.pump()

    def on_message(self, link: Link, message: UpMessage) -> None:
        match message:
            case Load():
                self.pump()
            case Tokens():
                for delta in message.deltas:
                    self._on_delta(link, delta)
            case Accept():
                self._on_accept(link, message)
            case Busy():
                self._on_busy(link, message)
            case End():
                self._on_end(link, message)
            case PrefillEnd():
                self._on_prefill_end(link, message)
            case Failed():
                self._on_failed(link, message)
            case Explain():
                self._on_explain(message)
            case Heartbeat():
                pass
            case _ as never:
                assert_never(never)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _dispatch(self, stream: LiveStream, route: Route) -> None:
        link, now = self._links[route.decode], self._clock()
        stream.advance("dispatch")
        stream.placement = Placement(route.decode, route.prefill, route.local)
        stream.marks.dispatched = now
        logger.debug("dispatch %r to decode %x (%s)", stream.key, route.decode, route.reason)
        number = link.next_dispatch(route.blocks, 0 if route.prefill else stream.num_prompt)
        link.send(make_generate(stream, number, now))

    def _offer(self, stream: LiveStream, link: Link, skip_tokens: int) -> None:
        stream.advance("accept_remote")
        stream.placement.is_prefill_open = True
        link.send(make_prefill(stream, link.next_dispatch(0, stream.num_prompt), skip_tokens, self._clock()))

    def _on_accept(self, link: Link, message: Accept) -> None:
        stream = self._current(message.stream, message.attempt)
        if stream is None:
            return
        place = stream.placement
        if link.incarnation == place.decode and stream.state == "reserving":
            stream.marks.decode_accepted = self._clock()
            if place.prefill is None:
                stream.num_cached = message.cached_tokens
                stream.advance("accept_local")
                return
            prefill = self._links.get(place.prefill)
            if prefill is not None and prefill.is_up and not prefill.snapshot().is_refusing:
                self._offer(stream, prefill, message.skip_tokens)
            else:
                self._give_back(stream, "busy", "prefill_time")
        elif (
            link.incarnation == place.prefill
            and stream.state in ("offering", "decoding")
            and not stream.marks.prefill_accepted
        ):
            stream.marks.prefill_accepted = self._clock()
            stream.num_cached = message.cached_tokens
            stream.advance("prefill_accept")

    def _on_busy(self, link: Link, message: Busy) -> None:
        stream = self._current(message.stream, message.attempt)
        if stream is None:
            return
        link.refuse_until_load()
        label: WaitLabel = "no_lane" if message.reason == "no_lane" else "decode_blocks"
        if link.incarnation == stream.placement.decode and stream.state == "reserving":
            stream.placement.decode = 0
            self._give_back(stream, "busy", label)
        elif link.incarnation == stream.placement.prefill and stream.state == "offering":
            stream.placement.is_prefill_open = False
            self._give_back(stream, "busy", "prefill_time")

    def _on_delta(self, link: Link, delta: Delta) -> None:
        stream = self._current(delta.stream, delta.attempt)
        if stream is None or link.incarnation != stream.placement.decode or stream.state in ("queued", "reserving"):
            return
        if stream.apply(delta.position, delta.tokens, self._clock()) == "gap":
            self._ask_again(stream)
        self._end_if_complete(stream)

    def _on_end(self, link: Link, message: End) -> None:
        stream = self._current(message.stream, message.attempt)
        if stream is None or link.incarnation != stream.placement.decode:
            link.send(Seen(message.stream, message.attempt))
            return
        stream.decode_timings = message.timings
        if not stream.promise_end(message.count, message.reason):
            self._ask_again(stream)  # SEEN waits: decode keeps the tokens until then
        self._end_if_complete(stream)

    def _end_if_complete(self, stream: LiveStream) -> None:
        reason = stream.promised_reason()
        if reason is not None:
            self._links[stream.placement.decode].send(Seen(stream.id, stream.attempt))
            stream.finish(Finished(reason), self._clock())

    def _on_prefill_end(self, link: Link, message: PrefillEnd) -> None:
        link.send(Seen(message.stream, message.attempt))
        stream = self._streams.get(message.stream)
        if stream is not None and stream.attempt == message.attempt and link.incarnation == stream.placement.prefill:
            stream.prefill_timings = message.timings
            stream.placement.is_prefill_open = False

    def _on_failed(self, link: Link, message: Failed) -> None:
        link.send(Seen(message.stream, message.attempt))
        stream = self._current(message.stream, message.attempt)
        if stream is None or stream.state == "queued":
            return
        failure = _find_failure(message.reason, bool(stream.tokens))
        logger.info(
            "attempt failed %r stage=%s reason=%s worker=%x",
            stream.key,
            message.stage,
            message.reason,
            link.incarnation,
        )
        if link.incarnation == stream.placement.decode:
            stream.placement.decode = 0
            self._fail(stream, failure, blames_prefill=failure == "transfer")
        elif link.incarnation == stream.placement.prefill:
            stream.placement.is_prefill_open = False
            if stream.state == "offering" or failure == "invalid":
                self._fail(stream, "transfer" if failure == "internal" else failure, blames_prefill=True)
            elif stream.state == "computing":
                self._await_verdict(stream, "transfer")

    def _on_explain(self, message: Explain) -> None:
        stream = self._streams.get(message.stream)
        if stream is not None and stream.explain is not None and stream.attempt == message.attempt:
            stream.explain.facts.append(message)

    # --- endings ----------------------------------------------------------------------------------------------------

    def _fail(self, stream: LiveStream, failure: Failure, blames_prefill: bool = False) -> None:
        if blames_prefill and stream.placement.prefill is not None:
            stream.avoid.add(stream.placement.prefill)
        others = [w for w in self._pool("prefill") if w.can_serve and w.incarnation not in stream.avoid]
        situation = Situation(bool(stream.tokens), stream.spent, bool(others), self._config.local_fallback)
        verdict = decide_retry(failure, situation, self._budgets)
        if isinstance(verdict, Retry):
            logger.info("retry %r reason=%s local=%s", stream.key, failure, verdict.is_local)
            stream.spent, stream.needs_local = verdict.spent, verdict.is_local
            self._give_back(stream, failure, None)
        else:
            self._end(stream, verdict, _ABORT_REASONS.get(failure, "retry"))

    def _give_back(self, stream: LiveStream, why: Failure, label: WaitLabel | None) -> None:
        """Ends the attempt on both workers and puts the stream back where it stood in the queue."""
        self._abort_attempt(stream, "retry")
        logger.debug("requeue %r reason=%s", stream.key, why)
        stream.requeue()
        stream.marks.prefill_accepted = 0.0
        self.queue.push(stream)
        if label is not None:
            self.queue.label = label
        self.pump()

    def _end(self, stream: LiveStream, error: ApiError, reason: AbortReason) -> None:
        self._abort_attempt(stream, reason)
        self.queue.remove(stream)
        stream.finish(error, self._clock())

    def _abort_attempt(self, stream: LiveStream, reason: AbortReason) -> None:
        place = stream.placement
        for incarnation in (place.decode, place.prefill if place.is_prefill_open else None):
            link = self._links.get(incarnation or 0)
            if link is not None and stream.state != "queued":
                link.send(Abort(stream.id, stream.attempt, reason))
        place.is_prefill_open = False

    def _await_verdict(self, stream: LiveStream, failure: Failure) -> None:
        if stream.verdict is None:
            stream.verdict = Verdict(self._clock() + self._config.verdict_s, failure)

    def _ask_again(self, stream: LiveStream) -> None:
        if stream.should_ask_gap(self._clock()):
            position = Position(stream.id, stream.attempt, len(stream.tokens))
            link = self._links.get(stream.placement.decode)
            if link is not None:
                link.send(Resume((position,), complete=False))

    # --- questions --------------------------------------------------------------------------------------------------

    def _find_overdue(self, stream: LiveStream, now: float) -> Failure | None:
        due = stream.deadlines
        if due.total_at is not None and now >= due.total_at:
            return "total_deadline"
        if not stream.tokens and now >= due.first_token_at:
            return "first_token_deadline"
        if stream.tokens and now - stream.marks.last_token >= due.progress_s:
            return "progress_deadline"
        return stream.verdict.failure if stream.verdict is not None and now >= stream.verdict.at else None

    def _need(self, stream: LiveStream) -> Need:
        remaining = stream.sampling.max_tokens - len(stream.tokens)
        local: LocalReason = "fallback" if stream.needs_local else "none"
        return Need(stream.num_prompt + len(stream.tokens), remaining, local, frozenset(stream.avoid))

    def _current(self, stream_id: bytes, attempt: int) -> LiveStream | None:
        """The open stream of this attempt; None for anything stale."""
        stream = self._streams.get(stream_id)
        return stream if stream is not None and stream.attempt == attempt and stream.state != "done" else None

    def _open_streams(self) -> list[LiveStream]:
        return [s for s in self._streams.values() if s.state != "done"]

    def _pool(self, role: Role) -> Iterable[WorkerSnapshot]:
        return (s for s in self.snapshots() if s.role == role)
