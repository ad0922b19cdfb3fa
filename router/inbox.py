"""What the workers say, turned into steps of the dispatcher: the owner of every link.

A message counts only for the current attempt of its stream and from the worker that the attempt was placed on; anything
else is stale and at most acknowledged. Knows messages; decides nothing that dispatcher.py or retry.py decides.
"""

import logging
from collections.abc import Callable
from typing import assert_never

from router.dispatcher import Dispatcher, Link
from router.retry import Failure
from router.stream import Finished, LiveStream
from router.worker_view import WaitLabel
from workers.protocol import (
    Accept,
    Busy,
    Cache,
    Delta,
    End,
    Explain,
    Failed,
    FailReason,
    Heartbeat,
    Load,
    Position,
    PrefillEnd,
    Seen,
    Tokens,
    UpMessage,
)

logger = logging.getLogger(__name__)


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


class Inbox:
    """A `link.LinkOwner`: called on the event loop, never blocks."""

    def __init__(self, desk: Dispatcher, clock: Callable[[], float]) -> None:
        self._desk, self._clock = desk, clock

    def positions(self, link: Link) -> tuple[Position, ...]:
        """Streams whose reservations are whole go on over a new connection; the worker aborts all else."""
        found = []
        for stream in self._desk.open_streams():
            if stream.state in ("computing", "decoding") and stream.placement.decode == link.incarnation:
                found.append(Position(stream.id, stream.attempt, len(stream.tokens)))
            elif stream.placement.prefill == link.incarnation and stream.placement.is_prefill_open:
                found.append(Position(stream.id, stream.attempt, 0))
        return tuple(found)

    def on_up(self, link: Link) -> None:
        for stream in self._desk.open_streams():
            is_awaited = stream.verdict is not None and stream.verdict.failure == "prefill_lost"
            if is_awaited and stream.placement.prefill == link.incarnation:
                stream.verdict = None

    def on_broken(self, link: Link) -> None:
        for stream in self._desk.open_streams():
            if stream.placement.decode == link.incarnation and stream.state in ("reserving", "offering"):
                self._desk.fail(stream, "unknown")
            elif stream.placement.prefill == link.incarnation and stream.state == "offering":
                self._desk.fail(stream, "prefill_lost", blames_prefill=True)
            elif stream.placement.prefill == link.incarnation and stream.state == "computing":
                self._desk.await_verdict(stream, "prefill_lost")
        self._desk.pump()

    def on_lost(self, link: Link) -> None:
        for stream in self._desk.open_streams():
            if stream.placement.decode == link.incarnation and stream.state != "queued":
                self._desk.fail(stream, "decode_lost")
        self._desk.pump()

    def on_message(self, link: Link, message: UpMessage) -> None:
        match message:
            case Load():
                self._desk.pump()
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
            case Heartbeat() | Cache():
                pass
            case _ as never:
                assert_never(never)

    def _on_accept(self, link: Link, message: Accept) -> None:
        stream = self._desk.current(message.stream, message.attempt)
        if stream is None:
            return
        place = stream.placement
        if link.incarnation == place.decode and stream.state == "reserving":
            stream.marks.decode_accepted = self._clock()
            if place.prefill is None:
                stream.num_cached = message.cached_tokens
                stream.advance("accept_local")
                return
            prefill = self._desk.find_link(place.prefill)
            if prefill is not None and prefill.is_up and not prefill.snapshot().is_refusing:
                self._desk.offer(stream, prefill, message.skip_tokens)
            else:
                self._desk.give_back(stream, "busy", "prefill_time")
        elif link.incarnation == place.prefill and not stream.marks.prefill_accepted:
            stream.marks.prefill_accepted = self._clock()
            stream.num_cached = message.cached_tokens
            stream.advance("prefill_accept")

    def _on_busy(self, link: Link, message: Busy) -> None:
        stream = self._desk.current(message.stream, message.attempt)
        if stream is None:
            return
        link.refuse_until_load()
        label: WaitLabel = "no_lane" if message.reason == "no_lane" else "decode_blocks"
        if link.incarnation == stream.placement.decode and stream.state == "reserving":
            stream.placement.decode = 0
            self._desk.give_back(stream, "busy", label)
        elif link.incarnation == stream.placement.prefill and stream.state == "offering":
            stream.placement.is_prefill_open = False
            self._desk.give_back(stream, "busy", "prefill_time")

    def _on_delta(self, link: Link, delta: Delta) -> None:
        stream = self._desk.current(delta.stream, delta.attempt)
        if stream is None or link.incarnation != stream.placement.decode or stream.state in ("queued", "reserving"):
            return
        if stream.apply(delta.position, delta.tokens, self._clock(), delta.logprobs) == "gap":
            self._desk.ask_again(stream)
        self._end_if_complete(link, stream)

    def _on_end(self, link: Link, message: End) -> None:
        stream = self._desk.current(message.stream, message.attempt)
        if stream is None or link.incarnation != stream.placement.decode:
            link.send(Seen(message.stream, message.attempt))
            return
        stream.decode_timings = message.timings
        if not stream.promise_end(message.count, message.reason):
            self._desk.ask_again(stream)  # SEEN waits: decode keeps the tokens until then
        self._end_if_complete(link, stream)

    def _end_if_complete(self, link: Link, stream: LiveStream) -> None:
        reason = stream.promised_reason()
        if reason is not None:
            link.send(Seen(stream.id, stream.attempt))
            stream.finish(Finished(reason), self._clock())

    def _on_prefill_end(self, link: Link, message: PrefillEnd) -> None:
        link.send(Seen(message.stream, message.attempt))
        stream = self._desk.find_stream(message.stream)
        if stream is not None and stream.attempt == message.attempt and link.incarnation == stream.placement.prefill:
            stream.end_prefill(message.timings)

    def _on_failed(self, link: Link, message: Failed) -> None:
        link.send(Seen(message.stream, message.attempt))
        stream = self._desk.current(message.stream, message.attempt)
        if stream is None or stream.state == "queued":
            return
        failure = _find_failure(message.reason, bool(stream.tokens))
        worker = link.incarnation
        logger.info("attempt failed %r stage=%s reason=%s worker=%x", stream.key, message.stage, message.reason, worker)
        if link.incarnation == stream.placement.decode:
            stream.placement.decode = 0
            is_drain = stream.verdict is not None and stream.verdict.failure == "draining"
            blames_prefill = failure == "transfer"
            self._desk.fail(stream, "draining" if blames_prefill and is_drain else failure, blames_prefill)
        elif link.incarnation == stream.placement.prefill:
            stream.placement.is_prefill_open = False
            if stream.state == "offering" or failure == "invalid":
                self._desk.fail(stream, "transfer" if failure == "internal" else failure, blames_prefill=True)
            elif stream.state == "computing":
                self._desk.await_verdict(stream, "draining" if failure == "draining" else "transfer")

    def _on_explain(self, message: Explain) -> None:
        stream = self._desk.find_stream(message.stream)
        if stream is not None and stream.explain is not None and stream.attempt == message.attempt:
            stream.explain.facts.append(message)
