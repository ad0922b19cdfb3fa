"""The one queue and the door in front of it. Pure: the clock is the caller's.

First come, first served by arrival, where each level of priority counts as PRIORITY_S of waiting; also for a request
that comes back from a refusal: it stands where it stood. Each waiting request
carries the label of what it waits for, which is what the pools scale on.
"""

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from router.errors import ApiError
from router.worker_view import WaitLabel

MAX_RETRY_AFTER_S = 30


class Waiting(Protocol):
    """What the queue asks of its members."""

    @property
    def arrival(self) -> tuple[float, int]: ...


_W = TypeVar("_W", bound=Waiting)


class ArrivalQueue(Generic[_W]):
    """Members in order of arrival; `push` of a returning one puts it back in front of all that came later."""

    def __init__(self) -> None:
        self._waiting: list[_W] = []
        self.label: WaitLabel | None = None
        """What the head waits for; those behind it wait for the same."""

    def __len__(self) -> int:
        return len(self._waiting)

    def head(self) -> _W | None:
        return self._waiting[0] if self._waiting else None

    def push(self, member: _W) -> None:
        bisect.insort(self._waiting, member, key=lambda m: m.arrival)

    def remove(self, member: _W) -> None:
        """Idempotent."""
        if member in self._waiting:
            self._waiting.remove(member)
        if not self._waiting:
            self.label = None

    def count_by_label(self) -> dict[str, int]:
        return dict(Counter({self.label: len(self._waiting)})) if self._waiting and self.label else {}


@dataclass(frozen=True, slots=True)
class Door:
    """What admission looks at."""

    num_queued: int
    max_queued: int
    head_waited_s: float
    has_workers: bool
    may_come: bool
    """A worker may still start."""
    is_closing: bool


Admission = Literal["admit"] | ApiError


def decide_admission(door: Door) -> Admission:
    """Admit, or the error that says why not: 503 when closing or nobody can ever serve, 429 when the queue is full."""
    if door.is_closing:
        return ApiError("shutting_down", "The server is shutting down.", retry_after_s=5)
    if not door.has_workers and not door.may_come:
        return ApiError("no_capacity", "There is no worker and none is expected.", retry_after_s=MAX_RETRY_AFTER_S)
    if door.num_queued >= door.max_queued:
        wait = min(max(1, round(door.head_waited_s)), MAX_RETRY_AFTER_S)
        message = f"{door.num_queued} requests wait already; the limit is {door.max_queued}."
        return ApiError("queue_full", message, retry_after_s=wait)
    return "admit"
