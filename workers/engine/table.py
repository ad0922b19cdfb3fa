"""The requests of an engine by key and by status. Knows no blocks and no steps."""

import bisect
from collections.abc import Iterable
from typing import get_args

from workers.engine.request import Event, Request, Status


class RequestTable:
    """Every open request once; `running` and `preempted` are in order of seniority. One writer: the engine thread.

    Statuses change here and nowhere else, so that counting is a look-up.
    """

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self._by_key: dict[object, Request] = {}
        self._counts: dict[Status, int] = dict.fromkeys(get_args(Status), 0)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def get(self, key: object) -> Request | None:
        return self._by_key.get(key)

    def all(self) -> Iterable[Request]:
        return self._by_key.values()

    def count(self, status: Status) -> int:
        return self._counts[status]

    def apply(self, request: Request, event: Event) -> None:
        """Move a request to its next status: "reserve" lets it in, what ends it lets it go. Raises
        `UnexpectedEvent`."""
        before = request.status
        request.apply(event)
        after = request.status
        if before == "new":
            self._by_key[request.key] = request
        else:
            self._counts[before] -= 1
            self._leave(before, request)
        if after in ("finished", "released"):
            del self._by_key[request.key]
        else:
            self._counts[after] += 1
            self._enter(after, request)

    def _enter(self, status: Status, request: Request) -> None:
        if status == "running":
            bisect.insort(self.running, request, key=_seniority)
        elif status == "preempted":
            bisect.insort(self.preempted, request, key=_seniority)

    def _leave(self, status: Status, request: Request) -> None:
        if status == "running":
            self.running.remove(request)
        elif status == "preempted":
            self.preempted.remove(request)


def _seniority(request: Request) -> float:
    return request.seniority
