"""One transfer as the sender (prefill) sees it: a table of states, and what to do on each event.

Pure: no sockets, no torch, no clock. The owner feeds events, performs the returned actions in order, and forgets the
transfer once `is_ended`. Units live in three places: `queued` here until the grant, then the lane, then `num_sent`.

    BEGUN --grant--> STREAMING --finish--> FINISHING --idle--> CLAIMED --adopted--> ENDED
      |  \\--finish--> EARLY --grant--^                  (FIN is out)
      | own abort                  | own or peer's abort
      v                            v
    WITHDRAWN --grant--> ENDED   DRAINING --idle--> ENDED      a lost link ends every state

A grant is answered by exactly one of: FIN that gets ADOPTED, or DRAINED, or the loss of the link.
"""

import enum
from dataclasses import dataclass, field

from kv_transfer.errors import OutOfOrder
from kv_transfer.messages import TransferKey, Unit

MAX_STORY = 32


class SendState(enum.Enum):
    BEGUN = enum.auto()
    EARLY = enum.auto()
    """Finished by the engine before the grant came."""
    STREAMING = enum.auto()
    FINISHING = enum.auto()
    CLAIMED = enum.auto()
    """FIN is out; waiting for ADOPTED."""
    WITHDRAWN = enum.auto()
    """Aborted before the grant came; the grant, when it comes, is owed a DRAINED."""
    DRAINING = enum.auto()
    """Aborted; announced units still finish."""
    ENDED = enum.auto()


class SendEvent(enum.Enum):
    GRANT = enum.auto()
    FINISH = enum.auto()
    IDLE = enum.auto()
    """Nothing of this transfer is queued in the lane or in flight."""
    ADOPTED = enum.auto()
    ABORT = enum.auto()
    PEER_ABORT = enum.auto()
    LOST = enum.auto()


class SendAction(enum.Enum):
    RELEASE_UNITS = enum.auto()
    """Hand the queued units to the lane, and every later one at once."""
    DROP_UNITS = enum.auto()
    """Forget the units that are not announced."""
    SEND_FIN = enum.auto()
    SEND_ABORT = enum.auto()
    SEND_DRAINED = enum.auto()
    EMIT_GRANTED = enum.auto()
    EMIT_ADOPTED = enum.auto()
    EMIT_FAILED = enum.auto()


_S, _E, _A = SendState, SendEvent, SendAction
_Actions = tuple[SendAction, ...]
TABLE: dict[tuple[SendState, SendEvent], tuple[SendState, _Actions]] = {
    (_S.BEGUN, _E.GRANT): (_S.STREAMING, (_A.RELEASE_UNITS, _A.EMIT_GRANTED)),
    (_S.BEGUN, _E.FINISH): (_S.EARLY, ()),
    (_S.BEGUN, _E.ABORT): (_S.WITHDRAWN, (_A.DROP_UNITS, _A.SEND_ABORT)),
    (_S.BEGUN, _E.PEER_ABORT): (_S.ENDED, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.BEGUN, _E.LOST): (_S.ENDED, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.EARLY, _E.GRANT): (_S.FINISHING, (_A.RELEASE_UNITS, _A.EMIT_GRANTED)),
    (_S.EARLY, _E.ABORT): (_S.WITHDRAWN, (_A.DROP_UNITS, _A.SEND_ABORT)),
    (_S.EARLY, _E.PEER_ABORT): (_S.ENDED, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.EARLY, _E.LOST): (_S.ENDED, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.STREAMING, _E.FINISH): (_S.FINISHING, ()),
    (_S.STREAMING, _E.ABORT): (_S.DRAINING, (_A.DROP_UNITS, _A.SEND_ABORT)),
    (_S.STREAMING, _E.PEER_ABORT): (_S.DRAINING, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.STREAMING, _E.LOST): (_S.ENDED, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.FINISHING, _E.IDLE): (_S.CLAIMED, (_A.SEND_FIN,)),
    (_S.FINISHING, _E.ABORT): (_S.DRAINING, (_A.DROP_UNITS, _A.SEND_ABORT)),
    (_S.FINISHING, _E.PEER_ABORT): (_S.DRAINING, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.FINISHING, _E.LOST): (_S.ENDED, (_A.DROP_UNITS, _A.EMIT_FAILED)),
    (_S.CLAIMED, _E.ADOPTED): (_S.ENDED, (_A.EMIT_ADOPTED,)),
    (_S.CLAIMED, _E.ABORT): (_S.ENDED, (_A.SEND_ABORT, _A.SEND_DRAINED)),
    (_S.CLAIMED, _E.PEER_ABORT): (_S.ENDED, (_A.SEND_DRAINED, _A.EMIT_FAILED)),
    (_S.CLAIMED, _E.LOST): (_S.ENDED, (_A.EMIT_FAILED,)),
    (_S.WITHDRAWN, _E.GRANT): (_S.ENDED, (_A.SEND_DRAINED,)),
    (_S.WITHDRAWN, _E.FINISH): (_S.WITHDRAWN, ()),
    (_S.WITHDRAWN, _E.ABORT): (_S.WITHDRAWN, ()),
    (_S.WITHDRAWN, _E.PEER_ABORT): (_S.ENDED, ()),
    (_S.WITHDRAWN, _E.LOST): (_S.ENDED, ()),
    (_S.DRAINING, _E.IDLE): (_S.ENDED, (_A.SEND_DRAINED,)),
    (_S.DRAINING, _E.FINISH): (_S.DRAINING, ()),
    (_S.DRAINING, _E.ABORT): (_S.DRAINING, ()),
    (_S.DRAINING, _E.PEER_ABORT): (_S.DRAINING, ()),
    (_S.DRAINING, _E.LOST): (_S.ENDED, ()),
}
_SETTLING = (_S.FINISHING, _S.DRAINING)
_ACCEPTING = (_S.BEGUN, _S.STREAMING)


@dataclass(slots=True)
class SendTransfer:
    """The sender's side of one transfer. One caller at a time."""

    key: TransferKey
    skip_tokens: int
    num_tokens: int
    num_layers: int
    state: SendState = SendState.BEGUN
    generation: int = 0
    """Of the grant; 0 before it."""
    in_lane: int = 0
    """Units handed to the lane and not yet sent."""
    num_pushed: int = 0
    num_sent: int = 0
    digests: list[int] = field(default_factory=list)
    meta: bytes = b""
    next_token: list[int] = field(default_factory=list)
    """Per layer, the token that the next unit of it starts with."""
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_token = [self.skip_tokens] * self.num_layers

    @property
    def is_ended(self) -> bool:
        return self.state is SendState.ENDED

    @property
    def takes_units(self) -> bool:
        """Whether a unit pushed now is wanted; otherwise it may be dropped unseen."""
        return self.state in _ACCEPTING

    @property
    def is_granted(self) -> bool:
        return self.state in (SendState.STREAMING, SendState.FINISHING)

    def on(self, event: SendEvent) -> _Actions:
        """The actions of `event`, to be performed in order. Raises `OutOfOrder` when this state forbids it."""
        entry = TABLE.get((self.state, event))
        if entry is None:
            raise OutOfOrder(
                f"transfer {self.key!r}: {event.name} in {self.state.name} after {' '.join(self.story) or 'begin'}"
            )
        if len(self.story) < MAX_STORY:
            self.story.append(event.name)
        self.state, actions = entry
        return actions

    def settle(self) -> _Actions:
        """The actions that fall due when nothing is left in the lane; call it after anything that may have emptied
        it."""
        if self.in_lane == 0 and self.state in _SETTLING:
            return self.on(SendEvent.IDLE)
        return ()

    def add_unit(self, first_token: int, num_tokens: int, first_layer: int, num_layers: int) -> int:
        """Counts a unit in and returns its index. Units of a layer come in token order without gap; raises
        ValueError."""
        layers = range(first_layer, first_layer + num_layers)
        if (
            num_tokens < 1
            or num_layers < 1
            or layers.stop > self.num_layers
            or first_token + num_tokens > self.num_tokens
        ):
            raise ValueError(
                f"{self.key!r}: tokens {first_token}+{num_tokens}, layers {first_layer}+{num_layers} are outside"
            )
        if any(self.next_token[layer] != first_token for layer in layers):
            raise ValueError(
                f"{self.key!r}: layers {layers} expect token {self.next_token[first_layer]}, got {first_token}"
            )
        for layer in layers:
            self.next_token[layer] = first_token + num_tokens
        self.num_pushed += 1
        return self.num_pushed - 1

    def unit_sent(self, digest: int | None) -> _Actions:
        """Counts a unit out of the lane; units leave in the order of their index."""
        self.in_lane -= 1
        self.num_sent += 1
        if digest is not None:
            self.digests.append(digest)
        return self.settle()

    def notice(self, index: int, part: tuple[int, int, int, int], num_bytes: int) -> Unit:
        """The UNIT message of (first_token, num_tokens, first_layer, num_layers)."""
        first_token, num_tokens, first_layer, num_layers = part
        return Unit(
            *self.key, self.generation, index=index, first_token=first_token, num_tokens=num_tokens,
            first_layer=first_layer, num_layers=num_layers, num_bytes=num_bytes,
        )  # fmt: skip
