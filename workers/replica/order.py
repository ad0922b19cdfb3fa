"""Who may be passed and for how long: a refused request is not starved by smaller ones. Pure; the clock is an argument.

docs/protocol.md, Reservations, "Order": a worker remembers the longest-waiting refused request for 1 s (each retry
renews it). Once others have been accepted past it for 1 s, whatever waited less is told BUSY(behind_older).
"""

from dataclasses import dataclass

MEMORY_S = 1.0
MAX_PASSED_S = 1.0


@dataclass(slots=True)
class _Refused:
    stream: bytes
    waiting_since: float
    last_asked: float
    passed_since: float | None = None


class PassingOrder:
    """The longest-waiting refused request of one worker. One caller: the engine thread."""

    def __init__(self) -> None:
        self._oldest: _Refused | None = None

    def must_yield(self, stream: bytes, waited_ms: int, now: float) -> bool:
        """True when accepting `stream` now would delay an older request that has been passed long enough."""
        oldest = self._current(now)
        if oldest is None or oldest.stream == stream or oldest.passed_since is None:
            return False
        return now - oldest.passed_since >= MAX_PASSED_S and now - waited_ms / 1000 > oldest.waiting_since

    def refused(self, stream: bytes, waited_ms: int, now: float) -> None:
        """Notes a refusal for lack of room."""
        oldest, since = self._current(now), now - waited_ms / 1000
        if oldest is not None and oldest.stream == stream:
            oldest.last_asked = now
        elif oldest is None or since < oldest.waiting_since:
            self._oldest = _Refused(stream, since, now)

    def accepted(self, stream: bytes, now: float) -> None:
        """Notes that `stream` got its reservation, perhaps past the remembered request."""
        oldest = self._current(now)
        if oldest is None:
            return
        if oldest.stream == stream:
            self._oldest = None
        elif oldest.passed_since is None:
            oldest.passed_since = now

    def _current(self, now: float) -> _Refused | None:
        if self._oldest is not None and now - self._oldest.last_asked > MEMORY_S:
            self._oldest = None
        return self._oldest
