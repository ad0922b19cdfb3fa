"""One end of a lane: an ordered queue of units over one data pair, a window, and the one thread that waits.

Knows order, the window and when a lane ends. Knows no message, no transfer and no session: what is posted for an item
and what happens when it completes are two functions of the owner. The sending and the receiving end run the same code.

Threads: `offer`, `drop` and `close` from any thread; `complete`, `on_ready` and `on_ended` run on the lane's thread.
"""

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kv_transfer.errors import DeadlineExceeded, PeerLost, TransferError
from kv_transfer.transports.base import AnyPair, Ticket

WINDOW = 4
"""Units posted and not complete. Six to twenty percent slower than free-running sends at 2-4 MiB, and no unit waits
behind many."""

WARM_UP_BYTES = 4096
T = TypeVar("T")


def make_warm_up(lane: bytes) -> Tensor:
    """What the sender sends first over a new data pair: known to who took part in the authenticated handshake only."""
    block = hashlib.sha256(b"baton lane warm-up" + lane).digest()
    return torch.frombuffer(bytearray(block * (WARM_UP_BYTES // len(block))), dtype=torch.uint8)


def is_warm_up(lane: bytes, received: Tensor) -> bool:
    """False when somebody else than the lane's peer is on the other end of its data pair."""
    return torch.equal(make_warm_up(lane), received)


class BlobExchange:
    """`transports.base.Exchange` over a lane's connection: `feed` and `fail` come from the loop that reads it."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.put = put
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def feed(self, blob: bytes) -> None:
        self._arrived.put(blob)

    def fail(self) -> None:
        self._arrived.put(None)

    def get(self, timeout_s: float) -> bytes:
        try:
            blob = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"no address of the peer within {timeout_s} s") from None
        if blob is None:
            raise PeerLost("the lane ended while it opened")
        return blob


@dataclass(frozen=True, slots=True)
class LaneWork(Generic[T]):
    """What the owner of a lane does with it."""

    open_pair: Callable[[], AnyPair]
    """Opens and warms the data pair; blocks. Raises `TransferError`."""
    post: Callable[[AnyPair, T], Ticket | None]
    """Announces and posts one item; never blocks; any thread, in order. None: nothing is posted on a one-sided pair.
    Raises `TransferError`."""
    complete: Callable[[T, Ticket | None], None]
    """Waits for the ticket and uses it, or does the item's work. Raises `TransferError`."""
    on_ready: Callable[[], None]
    on_ended: Callable[[str], None]
    """Once, with the reason, when the thread has ended and nothing is posted or written any more."""


class Lane(Generic[T]):
    def __init__(self, name: str, work: LaneWork[T]) -> None:
        self._work = work
        self._lock = threading.RLock()
        self._pair: AnyPair | None = None
        self._waiting: deque[T] = deque()
        self._posted: queue.SimpleQueue[tuple[T, Ticket | None] | None] = queue.SimpleQueue()
        self._num_posted = 0
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name=f"kv-lane-{name}", daemon=True)

    @property
    def num_in_flight(self) -> int:
        """Units posted and not complete: while this is not 0 bytes may be moving."""
        return self._num_posted

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._thread.start()

    def offer(self, item: T) -> None:
        """Queues an item; it is posted as soon as the pair is open and the window has room. A closed lane swallows
        it."""
        with self._lock:
            if not self._reason:
                self._waiting.append(item)
                self._pump()

    def drop(self, is_unwanted: Callable[[T], bool]) -> int:
        """Forgets the items that are not posted yet and fit; returns how many."""
        with self._lock:
            before = len(self._waiting)
            self._waiting = deque(item for item in self._waiting if not is_unwanted(item))
            return before - len(self._waiting)

    def close(self, reason: str) -> None:
        """Ends the lane for both ends without waiting: its pair is poisoned, its thread ends. Idempotent.

        A waiter that gloo holds in the middle of a message ends within STUCK_TIMEOUT_S; it touches staging memory only.
        """
        with self._lock:
            if self._reason:
                return
            self._reason = reason
            self._waiting.clear()
            pair = self._pair
        self._posted.put(None)
        if pair is not None:  # poison blocks for some milliseconds, and the caller may be an event loop
            threading.Thread(target=pair.poison, name="kv-poison", daemon=True).start()

    def _pump(self) -> None:
        """Posts what the window admits. Under the lock, which keeps posts in order."""
        while self._pair is not None and self._waiting and self._num_posted < WINDOW and not self._reason:
            item = self._waiting.popleft()
            try:
                ticket = self._work.post(self._pair, item)
            except TransferError as error:
                self.close(f"lane: {error}")
                return
            self._num_posted += 1
            self._posted.put((item, ticket))

    def _run(self) -> None:
        pair: AnyPair | None = None
        try:
            pair = self._work.open_pair()
            with self._lock:
                self._pair = pair
                if self._reason:
                    return
            self._work.on_ready()
            with self._lock:
                self._pump()
            while (entry := self._posted.get()) is not None:
                self._work.complete(*entry)
                del entry
                with self._lock:
                    self._num_posted -= 1
                    self._pump()
        except TransferError as error:
            self.close(f"lane: {error}")
        finally:
            self.close("lane_thread")
            if pair is not None:
                pair.poison()
            with self._lock:
                self._pair = None
            self._work.on_ended(self._reason)
