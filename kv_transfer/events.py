"""What the two ends of a channel report to the engine thread, and the traces that go with it.

Pure data. All times are microseconds of the reporting process's monotonic clock.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kv_transfer.messages import TransferKey


class SentUnit(NamedTuple):
    first_token: int
    num_tokens: int
    first_layer: int
    num_layers: int
    num_bytes: int
    pushed_us: int
    sent_us: int


class ArrivedUnit(NamedTuple):
    num_bytes: int
    arrived_us: int


@dataclass(frozen=True, slots=True)
class SendTrace:
    units: tuple[SentUnit, ...]


@dataclass(frozen=True, slots=True)
class ReceiveTrace:
    units: tuple[ArrivedUnit, ...]


@dataclass(frozen=True, slots=True)
class Granted:
    key: TransferKey


@dataclass(frozen=True, slots=True)
class Adopted:
    """Decode holds the whole KV cache and has verified it."""

    key: TransferKey
    trace: SendTrace


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer is over. Sender: nothing to do. Receiver: `revoke` gives the blocks back."""

    key: TransferKey
    reason: str


@dataclass(frozen=True, slots=True)
class PeerUp:
    incarnation: int


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Lost or suspect: no new work for it."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Every unit is written and verified, and ADOPTED is sent."""

    key: TransferKey
    meta: bytes
    trace: ReceiveTrace


@dataclass(frozen=True, slots=True)
class BlocksProven:
    """Blocks that a `revoke` returned as quarantined: nothing writes into them any more."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceUp:
    incarnation: int


@dataclass(frozen=True, slots=True)
class SourceDown:
    """Lost or suspect: no new work from it."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class KVSource:
    """Where a prefill leader can be dialled; a hint, the handshake is the truth."""

    incarnation: int
    host: str
    port: int


SenderEvent = Granted | Adopted | TransferFailed | PeerUp | PeerDown
ReceiverEvent = Arrived | TransferFailed | BlocksProven | SourceUp | SourceDown
