"""The seam between lanes and the ways that bytes move.

A transport opens one data pair per lane. A pair moves flat uint8 buffers one way, in order: the n-th send fills the
n-th receive, and both have the same length. A broken pair is never repaired.
"""

from typing import Protocol

from torch import Tensor

OPEN_TIMEOUT_S = 5.0
STUCK_TIMEOUT_S = 10.0
"""A unit that does not complete within this time has a stuck lane."""


class Ticket(Protocol):
    """One posted send or receive; keeps its buffer alive."""

    @property
    def buffer(self) -> Tensor:
        """The flat uint8 buffer; a receive's bytes are valid after `wait` has returned."""
        ...

    def wait(self) -> None:
        """Returns when the operation is complete. Raises `PeerLost` when the pair broke or the lane is stuck. One
        caller."""
        ...


class DataPair(Protocol):
    """Both ends post in the order of the UNIT notices. Posting never blocks; any thread, one at a time."""

    def send(self, buffer: Tensor) -> Ticket:
        """Posts a send. `buffer` must not change until the ticket is complete. Raises `PeerLost`."""
        ...

    def receive(self, buffer: Tensor) -> Ticket:
        """Posts a receive that fills `buffer`. Raises `PeerLost`."""
        ...

    def poison(self) -> None:
        """Breaks the pair for both ends: no byte is written after the return, pending waits raise. Any thread;
        idempotent."""
        ...


class Exchange(Protocol):
    """Relays one opaque address blob each way over the lane's authenticated connection while the pair opens."""

    def put(self, blob: bytes) -> None: ...

    def get(self, timeout_s: float) -> bytes:
        """The peer's blob. Raises `DeadlineExceeded` or `PeerLost`."""
        ...


class Transport(Protocol):
    @property
    def name(self) -> str: ...

    def renew(self) -> None:
        """Call when a pair opened to somebody else than the peer: the next one opens elsewhere."""
        ...

    def open(self, rank: int, lane: bytes, exchange: Exchange) -> DataPair:
        """A connected pair; the receiver is rank 0, the sender rank 1. Blocks up to OPEN_TIMEOUT_S. Raises
        `TransferError`."""
        ...
