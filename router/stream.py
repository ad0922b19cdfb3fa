"""One live request between its arrival and its last token: where it stands, what it has, what it cost.

    queued -> reserving (GENERATE sent) -> offering (PREFILL sent) -> computing -> decoding -> done
                  |  \\___________________ local ___________________/^
                  '--- any refusal or failed attempt before the first token: back to queued, under the next attempt

Belongs to the ingress's event loop. The dispatcher writes, one consumer reads: tokens pile up as ids until it takes
them.
"""

import asyncio
import dataclasses
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from router.errors import ApiError, RouterError
from router.retry import Failure, Spent
from workers.prefix_hash import extend_chain, root_of
from workers.protocol import (
    PRIORITY_S,
    DecodeTimings,
    Explain,
    FinishReason,
    LocalReason,
    Logprobs,
    PrefillTimings,
    SamplingParams,
    StreamKey,
    pack_tokens,
    unpack_tokens,
)

StreamState = Literal["queued", "reserving", "offering", "computing", "decoding", "done"]
StreamEvent = Literal["dispatch", "accept_local", "accept_remote", "prefill_accept", "first_token", "requeue", "finish"]

TRANSITIONS: dict[tuple[StreamState, StreamEvent], StreamState] = {
    ("queued", "dispatch"): "reserving",
    ("queued", "finish"): "done",
    ("reserving", "accept_local"): "computing",
    ("reserving", "accept_remote"): "offering",
    ("reserving", "requeue"): "queued",
    ("reserving", "finish"): "done",
    ("offering", "prefill_accept"): "computing",
    ("offering", "first_token"): "decoding",  # decode's link may be faster than prefill's
    ("offering", "requeue"): "queued",
    ("offering", "finish"): "done",
    ("computing", "first_token"): "decoding",
    ("computing", "requeue"): "queued",
    ("computing", "finish"): "done",
    ("decoding", "prefill_accept"): "decoding",
    ("decoding", "finish"): "done",
}


class StreamFault(RouterError):
    """An event met a stream in a state that does not know it; the text tells the story so far."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The workers completed the stream."""

    reason: FinishReason


Outcome = Finished | ApiError
Applied = Literal["new", "old", "gap"]


@dataclass(slots=True)
class Marks:
    """When things happened, in seconds of the ingress's monotonic clock; 0 = not yet. A retry overwrites."""

    arrived: float
    queued: float = 0.0
    dispatched: float = 0.0
    decode_accepted: float = 0.0
    prefill_accepted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Instants of the ingress's monotonic clock, and the longest pause between two tokens in seconds."""

    first_token_at: float
    progress_s: float
    total_at: float | None


@dataclass(frozen=True, slots=True)
class Standing:
    """Whose request it is and how it ranks."""

    priority: int = 0
    """Higher goes first, as if it had waited PRIORITY_S longer per level."""
    tenant: bytes = b""


@dataclass(slots=True)
class Placement:
    """Where the current attempt lives."""

    decode: int = 0
    prefill: int | None = None
    local: LocalReason = "none"
    is_prefill_open: bool = False
    """Prefill was asked and has not said END or FAILED: it is owed an ABORT when the attempt ends early."""


@dataclass(slots=True)
class Verdict:
    """Decode's word is awaited until `at`; after that the attempt counts as failed by `failure`."""

    at: float
    failure: Failure


@dataclass(slots=True)
class ExplainRecord:
    """What the workers said about an explained stream."""

    facts: list[Explain] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)


class LiveStream:
    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        deadlines: Deadlines,
        marks: Marks,
        sequence: int,
        explain: bool = False,
        standing: Standing = Standing(),
    ) -> None:
        self.id = secrets.token_bytes(16)
        self.attempt = 0
        self.standing = standing
        self.num_prompt, self.packed_prompt = len(prompt), pack_tokens(prompt)
        self.sampling, self.deadlines, self.marks = sampling, deadlines, marks
        self.arrival = (marks.arrived - PRIORITY_S * standing.priority, sequence)
        self.state: StreamState = "queued"
        self.placement = Placement()
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        """One per token where the request asks for them, else empty."""
        self.outcome: Outcome | None = None
        self.spent, self.avoid, self.needs_local = Spent(), set[int](), False
        self.verdict: Verdict | None = None
        self.num_cached = 0
        self.num_retries = 0
        self.prefill_timings: PrefillTimings | None = None
        self.decode_timings: DecodeTimings | None = None
        self.explain = ExplainRecord() if explain else None
        self._names: dict[int, list[bytes]] = {}
        self._promised: tuple[int, FinishReason] | None = None
        self._gap_asked_at: float | None = None
        self._changed = asyncio.Event()
        self._story: deque[str] = deque(maxlen=24)

    @property
    def key(self) -> StreamKey:
        return StreamKey(self.id, self.attempt)

    def another_choice(self, choice: int, sequence: int, now: float) -> "LiveStream":
        """A stream of the same request that draws apart; its first token has as long as this one's had."""
        patience_s = self.deadlines.first_token_at - self.marks.arrived
        return LiveStream(
            unpack_tokens(self.packed_prompt),
            dataclasses.replace(self.sampling, choice=choice),
            dataclasses.replace(self.deadlines, first_token_at=now + patience_s),
            Marks(now),
            sequence,
            standing=self.standing,
        )

    def waited_s(self, now: float) -> float:
        """Since it was queued, its priority counted as waiting."""
        return max(0.0, now - self.marks.queued + PRIORITY_S * self.standing.priority)

    def names(self, block_tokens: int) -> list[bytes]:
        """Names of the prompt's full blocks, for the search of who has them cached; made when first asked for."""
        names = self._names.get(block_tokens)
        if names is None:
            tokens, names = unpack_tokens(self.packed_prompt), []
            extend_chain(names, root_of(self.standing.tenant), tokens, block_tokens, (len(tokens) - 1) // block_tokens)
            self._names[block_tokens] = names
        return names

    def advance(self, event: StreamEvent) -> None:
        """Moves along TRANSITIONS. Raises `StreamFault`."""
        after = TRANSITIONS.get((self.state, event))
        self._story.append(f"{self.state}+{event}#{self.attempt}")
        if after is None:
            raise StreamFault(
                f"stream {self.id.hex()[:8]}: {event} in state {self.state}; story: {' '.join(self._story)}"
            )
        self.state = after

    def requeue(self) -> None:
        """Ends the attempt: whatever still arrives for it is stale."""
        self.advance("requeue")
        self.attempt += 1
        self.num_retries += 1
        self.placement, self.verdict = Placement(), None
        self._promised = self._gap_asked_at = None

    def apply(self, position: int, tokens: tuple[int, ...], now: float, logprobs: tuple[Logprobs, ...] = ()) -> Applied:
        """Appends what is new of a delta; position > count is a gap and changes nothing."""
        count = len(self.tokens)
        if position > count:
            return "gap"
        fresh = tokens[count - position :]
        if not fresh:
            return "old"
        if not count:
            self.advance("first_token")
            self.marks.first_token = now
        self.tokens.extend(fresh)
        self.logprobs.extend(logprobs[count - position :])
        if self.explain is not None:
            self.explain.token_times.extend([now] * len(fresh))
        self.marks.last_token, self.verdict, self._gap_asked_at = now, None, None
        self._changed.set()
        return "new"

    def promise_end(self, count: int, reason: FinishReason) -> bool:
        """END arrived. True when the tokens it counts are here or fewer are expected: then `end_if_complete` holds."""
        self._promised = (count, reason)
        return self.promised_reason() is not None

    def promised_reason(self) -> FinishReason | None:
        """The reason of an END whose every token has arrived."""
        return self._promised[1] if self._promised is not None and len(self.tokens) >= self._promised[0] else None

    def should_ask_gap(self, now: float) -> bool:
        """True once per second while tokens are missing: one RESUME per gap, and another where its answer was lost."""
        if self._gap_asked_at is not None and now - self._gap_asked_at < 1.0:
            return False
        self._gap_asked_at = now
        return True

    @property
    def is_missing_tokens(self) -> bool:
        return self._gap_asked_at is not None

    def finish(self, outcome: Outcome, now: float) -> None:
        """The last change: wakes the consumer."""
        self.advance("finish")
        self.outcome, self.marks.ended = outcome, now
        self._changed.set()

    def end_prefill(self, timings: PrefillTimings) -> None:
        """Prefill is done with the stream: decode has adopted the KV cache."""
        self.prefill_timings, self.placement.is_prefill_open = timings, False
        self._changed.set()

    async def wait_prefill_end(self) -> None:
        """Returns when no prefill worker owes an END any more. Same caller as `wait_beyond`; cancel-safe."""
        while self.placement.is_prefill_open:
            self._changed.clear()
            await self._changed.wait()

    async def wait_beyond(self, count: int) -> None:
        """Returns when there are over `count` tokens or the outcome is known. One caller; cancel-safe."""
        while len(self.tokens) <= count and self.outcome is None:
            self._changed.clear()
            await self._changed.wait()
