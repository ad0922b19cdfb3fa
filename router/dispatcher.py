"""The queue's far side: puts waiting streams on workers, gives them another attempt, or ends them.

Grant first: GENERATE to decode, ACCEPT, then PREFILL to prefill. Any refusal gives the other reservation back at once.
Synchronous but for one wait, with an injected clock; every method belongs to the ingress's event loop. It is the only
judge: workers report and stop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from router.admission import ArrivalQueue
from router.config import RouterConfig
from router.errors import ApiError
from router.grant import make_generate, make_prefill
from router.retry import Budgets, Failure, Retry, Situation, decide_retry
from router.stream import LiveStream, Placement, Verdict
from router.worker_view import Need, Route, Wait, WaitLabel, WorkerSnapshot, decide_route, pool_tokens
from workers.protocol import (
    MAX_TOKENS,
    Abort,
    AbortReason,
    DownMessage,
    LocalReason,
    Position,
    Resume,
    Role,
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
        for stream in self.open_streams():
            self._end(stream, error, "shutdown")

    def add_link(self, link: Link) -> None:
        self._links[link.incarnation] = link

    def drop_link(self, link: Link) -> None:
        if self._links.get(link.incarnation) is link:
            del self._links[link.incarnation]

    def snapshots(self) -> list[WorkerSnapshot]:
        return [link.snapshot() for link in self._links.values()]

    def find_link(self, incarnation: int) -> Link | None:
        return self._links.get(incarnation)

    def find_stream(self, stream_id: bytes) -> LiveStream | None:
        return self._streams.get(stream_id)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def pump(self) -> None:
        """Places the queue's head while there is room for it, in order of arrival."""
        while (stream := self.queue.head()) is not None:
            workers, need = self.snapshots(), self._need(stream)
            limit = pool_tokens(workers) or MAX_TOKENS + 1
            if need.num_known >= limit:
                message = f"The prompt's {need.num_known} tokens fit no worker: the limit with one more is {limit}."
                self._end(stream, ApiError("context_length", message), "retry")
                continue
            route = decide_route(workers, need, self._config.disaggregation, self._draw)
            if isinstance(route, Wait):
                self.queue.label = route.label
                return
            self.queue.remove(stream)
            self._dispatch(stream, route)

    def tick(self) -> None:
        """Enforces deadlines and awaited verdicts; call about ten times a second."""
        now = self._clock()
        for stream in self.open_streams():
            failure = self._find_overdue(stream, now)
            if failure is not None:
                self.fail(stream, failure, blames_prefill=stream.verdict is not None)
            elif stream.is_missing_tokens:
                self.ask_again(stream)
        self.pump()

    # --- steps, as the inbox asks for them --------------------------------------------------------------------------

    def _dispatch(self, stream: LiveStream, route: Route) -> None:
        link, now = self._links[route.decode], self._clock()
        stream.advance("dispatch")
        stream.placement = Placement(route.decode, route.prefill, route.local)
        stream.marks.dispatched = now
        logger.debug("dispatch %r to decode %x (%s)", stream.key, route.decode, route.reason)
        number = link.next_dispatch(route.blocks, 0 if route.prefill else stream.num_prompt)
        link.send(make_generate(stream, number, now))

    def offer(self, stream: LiveStream, link: Link, skip_tokens: int) -> None:
        stream.advance("accept_remote")
        stream.placement.is_prefill_open = True
        link.send(make_prefill(stream, link.next_dispatch(0, stream.num_prompt), skip_tokens, self._clock()))

    # --- endings ----------------------------------------------------------------------------------------------------

    def fail(self, stream: LiveStream, failure: Failure, blames_prefill: bool = False) -> None:
        if blames_prefill and stream.placement.prefill is not None:
            stream.avoid.add(stream.placement.prefill)
        others = [w for w in self._pool("prefill") if w.can_serve and w.incarnation not in stream.avoid]
        situation = Situation(bool(stream.tokens), stream.spent, bool(others), self._config.local_fallback)
        verdict = decide_retry(failure, situation, self._budgets)
        if isinstance(verdict, Retry):
            logger.info("retry %r reason=%s local=%s", stream.key, failure, verdict.is_local)
            stream.spent, stream.needs_local = verdict.spent, verdict.is_local
            self.give_back(stream, failure, None)
        else:
            self._end(stream, self._refine(stream, failure, verdict), _ABORT_REASONS.get(failure, "retry"))

    def _refine(self, stream: LiveStream, failure: Failure, error: ApiError) -> ApiError:
        """A worker's refusal, which names nothing, with the request's size and the pools' limit."""
        if failure != "invalid":
            return error
        known, limit = stream.num_prompt + len(stream.tokens), pool_tokens(self.snapshots())
        return ApiError(
            error.kind, f"{error.message} It has {known} tokens; the pools hold {limit or 0} of one request."
        )

    def give_back(self, stream: LiveStream, why: Failure, label: WaitLabel | None) -> None:
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

    def await_verdict(self, stream: LiveStream, failure: Failure) -> None:
        if stream.verdict is None:
            stream.verdict = Verdict(self._clock() + self._config.verdict_s, failure)

    def ask_again(self, stream: LiveStream) -> None:
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
        known = stream.num_prompt + len(stream.tokens)
        return Need(known, remaining, local, frozenset(stream.avoid), stream.names)

    def current(self, stream_id: bytes, attempt: int) -> LiveStream | None:
        """The open stream of this attempt; None for anything stale."""
        stream = self._streams.get(stream_id)
        return stream if stream is not None and stream.attempt == attempt and stream.state != "done" else None

    def open_streams(self) -> list[LiveStream]:
        return [s for s in self._streams.values() if s.state != "done"]

    def _pool(self, role: Role) -> Iterable[WorkerSnapshot]:
        return (s for s in self.snapshots() if s.role == role)
