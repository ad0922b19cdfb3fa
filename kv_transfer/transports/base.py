"""The seam between lanes and the ways that bytes move.

A transport opens one pair per lane. A broken pair is never repaired. There are two kinds:

    two-sided   `DataPair` at both ends moves flat uint8 buffers one way, in order: the n-th send fills the n-th
                receive, and both have the same length
    one-sided   `TargetPair` at the receiver grants generations and revokes them, `WriterPair` at the sender writes
                into the receiver's pool under a generation, and announces what it has written
"""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from kv_transfer.fence import Copies, Window

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


@runtime_checkable
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


@runtime_checkable
class TargetPair(Protocol):
    """Nothing blocks. One caller at a time, but for `poison`."""

    def grant(self, newer_than: int) -> int | None:
        """Opens the first generation after `newer_than` that there is room for, and returns it; None: no room."""
        ...

    def revoke(self, generation: int) -> Window | None:
        """Nothing is written under this generation from now on, but what the returned window names. Idempotent."""
        ...

    def is_proven(self, generation: int) -> bool:
        """After `revoke`: whether nothing writes any more. True once is true for good."""
        ...

    def release(self, generation: int) -> None:
        """The generation is proven and will not be asked for again."""
        ...

    def poison(self) -> None: ...


@runtime_checkable
class WriterPair(Protocol):
    """A copy takes as long as a memory copy takes, and waits for nobody. One thread at a time per generation."""

    @property
    def pool(self) -> Tensor:
        """The receiver's whole pool, flat uint8."""
        ...

    def copy(self, generation: int, copies: Copies, source: Tensor) -> bool:
        """Copies from `source`'s memory into the pool; False when the generation is revoked. Raises `PeerLost`."""
        ...

    def window(self, generation: int, window: int) -> AbstractContextManager[bool]:
        """For one write into `pool` of WINDOW_BYTES at most; False: nothing may be written. Raises `PeerLost`."""
        ...

    def poison(self) -> None: ...


AnyPair = DataPair | TargetPair | WriterPair


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

    def open(self, rank: int, lane: bytes, exchange: Exchange) -> AnyPair:
        """A connected pair; the receiver is rank 0, the sender rank 1. Blocks up to OPEN_TIMEOUT_S. Raises
        `TransferError`."""
        ...
