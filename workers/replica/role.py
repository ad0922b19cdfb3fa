"""What prefill and decode do alike: admit a request or refuse it, and let an attempt go. Runs on the engine thread.

A role decides with what it is given: the engine, the desk, its end of the KV channel. What it says goes through the
desk.
"""

import abc
import time

from workers.engine.engine import Engine
from workers.engine.request import Reason, Request
from workers.protocol import Abort, BusyReason, FailReason, Generate, Prefill, StreamKey, unpack_tokens
from workers.replica.config import ReplicaConfig
from workers.replica.desk import Desk
from workers.replica.streams import Attempt


def now_us() -> int:
    """Microseconds of this machine's monotonic clock, which all of its processes read alike."""
    return time.monotonic_ns() // 1000


class Role(abc.ABC):
    """A role overrides the message it serves; the other one is refused as invalid."""

    def __init__(self, config: ReplicaConfig, engine: Engine, desk: Desk) -> None:
        self._config, self._engine, self.desk = config, engine, desk

    def generate(self, ingress: int, message: Generate) -> None:
        self._misdirected(ingress, message)

    def prefill(self, ingress: int, message: Prefill) -> None:
        self._misdirected(ingress, message)

    def _misdirected(self, ingress: int, message: Generate | Prefill) -> None:
        """A worker of another role was meant; says so instead of staying silent."""
        if self.desk.arrives(ingress, message):
            self._supersede(StreamKey(message.stream, message.attempt))
            self.desk.reject(ingress, message)

    # --- admission --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _refusal(self, message: Generate | Prefill, request: Request) -> BusyReason | None:
        """Why this role cannot take the request now, before the engine is asked for blocks. Raises ValueError for what
        it can never serve."""

    @abc.abstractmethod
    def _skip_tokens(self, message: Generate | Prefill, request: Request) -> int:
        """What ACCEPT says of the reserved request: tokens whose KV cache need not be shipped."""

    @abc.abstractmethod
    def _let_go(self, key: StreamKey, reason: str) -> None:
        """Ends the transfer and gives the blocks back; nothing when the attempt holds none."""

    def _num_pages(self, request: Request) -> int:
        """Pages reserved for `request`: those of every known token."""
        return self._engine.config.pages_for(len(request.known))

    def _keep_free(self) -> int:
        """Blocks that a reservation must leave free."""
        return 0

    def _admit(self, ingress: int, message: Generate | Prefill, *, reason: Reason, hold: bool) -> Request | None:
        """The reserved and accepted request; None when nothing is to be done: answered before, BUSY, or FAILED(invalid)
        for what this engine can never serve. A new attempt ends the one before it."""
        if not self.desk.arrives(ingress, message):
            return None
        key = StreamKey(message.stream, message.attempt)
        self._supersede(key)
        known, num_emitted = unpack_tokens(message.prompt + message.emitted), len(message.emitted) // 4
        request = Request(
            key=key, known=known, num_prompt=len(known) - num_emitted, num_emitted=num_emitted,
            sampling=message.sampling, hold_after_prompt=hold, reason=reason, explain=message.explain,
            arrival=self.desk.clock(), tenant=message.tenant, priority=message.priority,
            adopts=isinstance(message, Generate) and message.local == "none",
        )  # fmt: skip
        try:
            busy = self.desk.hindrance(message) or self._refusal(message, request)
            if busy is None and not self._engine.reserve(request, self._num_pages(request), self._keep_free()):
                busy = "blocks"
        except ValueError:
            self.desk.reject(ingress, message)
            return None
        if busy is not None:
            self.desk.refuse(ingress, message, busy)
            return None
        self.desk.accept(ingress, message, num_emitted, self._skip_tokens(message, request), request.num_cached)
        return request

    # --- ends -------------------------------------------------------------------------------------------------------

    def _supersede(self, key: StreamKey) -> None:
        older = self.desk.streams.older_than(key)
        if older is not None:
            self.drop(older)

    def abort(self, message: Abort) -> None:
        attempt = self.desk.streams.get(StreamKey(message.stream, message.attempt))
        if attempt is not None:
            self.drop(attempt)

    def drop(self, attempt: Attempt) -> None:
        """Stops the work of an attempt and forgets it; nothing more is said about it."""
        self._let_go(attempt.key, "aborted")
        self.desk.streams.remove(attempt.key)

    def expire(self, attempt: Attempt) -> None:
        """What the attempt waited for did not come in time."""
        self._let_go(attempt.key, "deadline")
        self.desk.fail(attempt.key, "deadline")

    def fail_rest(self) -> None:
        """At the end of a drain: everything still here fails as draining."""
        reason: FailReason = "draining"
        for attempt in self.desk.streams.live():
            self._let_go(attempt.key, reason)
            self.desk.fail(attempt.key, reason)
