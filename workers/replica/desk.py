"""What both roles share: the stream table, what is posted to the ingresses, order among refused requests, deadlines.

Runs on the engine thread only. Knows no engine, no KV transfer and no socket: a role asks the desk whether it may
accept a request, and tells it how the attempt ended.
"""

from collections.abc import Callable
from typing import Any

from workers.protocol import (
    Accept,
    Busy,
    BusyReason,
    Delta,
    End,
    Explain,
    Failed,
    FailReason,
    Generate,
    Logprobs,
    Prefill,
    PrefillEnd,
    Resume,
    Role,
    Stage,
    StreamKey,
    Tokens,
    UpMessage,
)
from workers.replica.lifecycle import Lifecycle
from workers.replica.order import PassingOrder
from workers.replica.streams import Attempt, StreamTable

EXPLAIN_BYTES = 60 << 10
ROOM_REASONS: frozenset[BusyReason] = frozenset(("blocks", "slots", "prefill_time", "behind_older"))


class Desk:
    """The front office of a role. `clock` gives monotonic seconds."""

    def __init__(self, role: Role, stage: Stage, lifecycle: Lifecycle, clock: Callable[[], float]) -> None:
        self.role, self.lifecycle, self.clock = role, lifecycle, clock
        self.streams = StreamTable(stage)
        self.dispatches: dict[int, int] = {}
        self._stage: Stage = stage
        self._order = PassingOrder()
        self._outbox: dict[int, list[UpMessage]] = {}
        self._deltas: dict[int, list[Delta]] = {}

    def take_outbox(self) -> dict[int, list[UpMessage]]:
        """Everything posted since the last call, one TOKENS message per ingress."""
        for ingress, deltas in self._deltas.items():
            self._outbox.setdefault(ingress, []).append(Tokens(tuple(deltas)))
        batches, self._outbox, self._deltas = self._outbox, {}, {}
        return batches

    def post(self, ingress: int, message: UpMessage) -> None:
        self._outbox.setdefault(ingress, []).append(message)

    # --- arrivals ---------------------------------------------------------------------------------------------------

    def arrives(self, ingress: int, message: Generate | Prefill) -> bool:
        """False when the attempt needs no further look: stale, or known (then it gets the same answer again)."""
        self.dispatches[ingress] = max(self.dispatches.get(ingress, 0), message.dispatch)
        key = StreamKey(message.stream, message.attempt)
        known = self.streams.get(key)
        if known is not None:
            self.post(ingress, known.accept)
        return known is None and not self.streams.is_stale(key)

    def hindrance(self, message: Generate | Prefill) -> BusyReason | None:
        """Why no request of this age can be accepted now, whatever its size."""
        if not self.lifecycle.accepts_work:
            return "draining"
        if self._order.must_yield(message.stream, message.waited_ms, self.clock()):
            return "behind_older"
        return None

    def refuse(self, ingress: int, message: Generate | Prefill, reason: BusyReason) -> None:
        """Answers BUSY and remembers who was refused for lack of room."""
        if reason in ROOM_REASONS:
            self._order.refused(message.stream, message.waited_ms, self.clock())
        self.post(ingress, Busy(message.stream, message.attempt, reason))

    def accept(
        self, ingress: int, message: Generate | Prefill, num_emitted: int, skip_tokens: int = 0, cached_tokens: int = 0
    ) -> Attempt:
        """Enters the attempt and answers ACCEPT. Its reservation is made already."""
        now = self.clock()
        self._order.accepted(message.stream, now)
        accept = Accept(message.stream, message.attempt, skip_tokens, cached_tokens)
        progress_ms = message.progress_ms if isinstance(message, Generate) else message.first_token_ms
        attempt = Attempt(
            key=StreamKey(message.stream, message.attempt),
            ingress=ingress,
            base=num_emitted,
            deadline=now + message.first_token_ms / 1000,
            progress_s=progress_ms / 1000,
            accept=accept,
        )
        self.streams.add(attempt)
        self.post(ingress, accept)
        return attempt

    def reject(self, ingress: int, message: Generate | Prefill) -> None:
        """Answers FAILED(invalid): no worker of this kind can ever serve the request."""
        self.accept(ingress, message, 0)
        self.fail(StreamKey(message.stream, message.attempt), "invalid")

    # --- results ----------------------------------------------------------------------------------------------------

    def token(self, key: StreamKey, position: int, token: int, logprobs: Logprobs | None = None) -> None:
        """Passes one output token on; positions must follow each other."""
        attempt = self.streams.get(key)
        if attempt is None:
            return
        assert position == attempt.base + len(attempt.outputs), f"{key}: token {position} after {len(attempt.outputs)}"
        attempt.outputs.append(token)
        attempt.deadline = self.clock() + attempt.progress_s
        told = () if logprobs is None else (logprobs,)
        attempt.logprobs.extend(told)
        delta = Delta(key.stream, key.attempt, position, (token,), told)
        self._deltas.setdefault(attempt.ingress, []).append(delta)

    def finish(self, key: StreamKey, final: End | Failed | PrefillEnd) -> None:
        """The one terminal answer of an attempt; ignored when it has one already or is gone."""
        attempt = self.streams.finish(key, final, self.clock())
        if attempt is not None:
            self.post(attempt.ingress, final)

    def fail(self, key: StreamKey, reason: FailReason, stage: Stage | None = None) -> None:
        self.finish(key, Failed(key.stream, key.attempt, stage or self._stage, reason))

    def explain(self, key: StreamKey, encode: Callable[[dict[str, Any]], bytes], facts: dict[str, Any]) -> None:
        """Sends the facts of an explained stream; too large ones are dropped rather than cut into invalid JSON."""
        attempt, text = self.streams.get(key), encode(facts)
        if attempt is not None and len(text) <= EXPLAIN_BYTES:
            self.post(attempt.ingress, Explain(key.stream, key.attempt, self.role, text))

    # --- the ingress's other words ----------------------------------------------------------------------------------

    def resume(self, ingress: int, message: Resume) -> list[Attempt]:
        """Answers what is asked again; returns the attempts that the ingress no longer knows, to be aborted."""
        doomed, answers = self.streams.resume(ingress, message)
        for answer in answers:
            self.post(ingress, answer)
        return doomed
