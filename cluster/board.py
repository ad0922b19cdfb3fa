"""Which workers each pool of this process's view holds: written by the membership, read by whoever subscribed.

Pure: no Ray, no asyncio. Thread-safe: Serve's router thread writes, subscribers are called on the thread that writes,
outside the lock, in the order of the writes of their pool.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.protocol import WorkerEndpoint

Subscriber = Callable[[tuple[WorkerEndpoint, ...]], None]
"""Called with all workers of a pool; must not block and must not raise."""


def describe_worker(endpoint: WorkerEndpoint) -> dict[str, Any]:
    """The `replica_metadata` of a worker: JSON values only."""
    return dataclasses.asdict(endpoint)


def read_worker(metadata: Mapping[str, Any]) -> WorkerEndpoint | None:
    """The inverse of `describe_worker`; None where a replica has not said where it is."""
    try:
        return WorkerEndpoint(**metadata)
    except TypeError:
        return None


class Board:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delivery = threading.Lock()
        self._pools: dict[str, tuple[WorkerEndpoint, ...]] = {}
        self._subscribers: dict[str, list[Subscriber]] = {}

    def publish(self, pool: str, workers: Sequence[WorkerEndpoint]) -> None:
        """The pool consists of `workers` now; subscribers hear of it when it differs from before."""
        ordered = tuple(sorted(workers, key=lambda worker: worker.incarnation))
        with self._delivery:
            with self._lock:
                if self._pools.get(pool) == ordered:
                    return
                self._pools[pool] = ordered
                subscribers = tuple(self._subscribers.get(pool, ()))
            for subscriber in subscribers:
                subscriber(ordered)

    def subscribe(self, pool: str, subscriber: Subscriber) -> None:
        """Every later change of the pool reaches `subscriber`, and its present workers at once where they are known."""
        with self._delivery:
            with self._lock:
                self._subscribers.setdefault(pool, []).append(subscriber)
                present = self._pools.get(pool)
            if present is not None:
                subscriber(present)

    def workers(self, pool: str) -> tuple[WorkerEndpoint, ...]:
        with self._lock:
            return self._pools.get(pool, ())


BOARD = Board()
"""The board of this process: one, because Serve creates the routers that write it."""
