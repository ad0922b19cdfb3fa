"""One transfer as the receiver (decode) sees it: a table of states, the coverage of units, and the write window.

Pure: no sockets, no torch, no clock. The owner feeds events under one lock, performs the returned actions in order, and
forgets the grant once `is_forgotten`.

    EXPECTED --begin--> GRANTED --fin--> CLAIMED --complete--> ADOPTED
        |                  |  abort, bad unit or lost link |
        | revoke           v                               v
        v               FAILED (the caller is told, and revokes) --> REVOKED --drained--> FORGOTTEN
    FORGOTTEN

Who may write: units are received into staging memory, and only between `open_window` and `close_window` does anything
write into granted blocks. `open_window` refuses every state but GRANTED and CLAIMED and every other generation. So
`revoke` gives all blocks back at once except those of windows that are open at that moment; `close_window` later proves
these.
"""

import enum
from dataclasses import dataclass, field

from kv_transfer.errors import OutOfOrder
from kv_transfer.messages import Fin, TransferKey, Unit, unpack_u32

MAX_STORY = 32


class GrantState(enum.Enum):
    EXPECTED = enum.auto()
    GRANTED = enum.auto()
    CLAIMED = enum.auto()
    """FIN is here; units may still be on their way (another connection)."""
    FAILED = enum.auto()
    """The caller was told and has not revoked yet; the sender still owes DRAINED."""
    FAILED_DRAINED = enum.auto()
    REVOKED = enum.auto()
    """The caller has its blocks back; the sender still owes DRAINED."""
    ADOPTED = enum.auto()
    FORGOTTEN = enum.auto()


class GrantEvent(enum.Enum):
    BEGIN = enum.auto()
    FIN = enum.auto()
    COMPLETE = enum.auto()
    """Every unit that FIN counts is written and verified."""
    BAD = enum.auto()
    """A unit or FIN contradicts the grant, or a digest differs."""
    PEER_ABORT = enum.auto()
    DRAINED = enum.auto()
    REVOKE = enum.auto()
    LOST = enum.auto()


class GrantAction(enum.Enum):
    SEND_GRANT = enum.auto()
    SEND_ADOPTED = enum.auto()
    SEND_ABORT = enum.auto()
    EMIT_ARRIVED = enum.auto()
    EMIT_FAILED = enum.auto()


_S, _E, _A = GrantState, GrantEvent, GrantAction
_Actions = tuple[GrantAction, ...]
TABLE: dict[tuple[GrantState, GrantEvent], tuple[GrantState, _Actions]] = {
    (_S.EXPECTED, _E.BEGIN): (_S.GRANTED, (_A.SEND_GRANT,)),
    (_S.EXPECTED, _E.REVOKE): (_S.FORGOTTEN, ()),
    (_S.EXPECTED, _E.LOST): (_S.FAILED_DRAINED, (_A.EMIT_FAILED,)),
    (_S.GRANTED, _E.FIN): (_S.CLAIMED, ()),
    (_S.GRANTED, _E.BAD): (_S.FAILED, (_A.SEND_ABORT, _A.EMIT_FAILED)),
    (_S.GRANTED, _E.PEER_ABORT): (_S.FAILED, (_A.EMIT_FAILED,)),
    (_S.GRANTED, _E.REVOKE): (_S.REVOKED, (_A.SEND_ABORT,)),
    (_S.GRANTED, _E.LOST): (_S.FAILED_DRAINED, (_A.EMIT_FAILED,)),
    (_S.CLAIMED, _E.COMPLETE): (_S.ADOPTED, (_A.SEND_ADOPTED, _A.EMIT_ARRIVED)),
    (_S.CLAIMED, _E.BAD): (_S.FAILED, (_A.SEND_ABORT, _A.EMIT_FAILED)),
    (_S.CLAIMED, _E.PEER_ABORT): (_S.FAILED, (_A.EMIT_FAILED,)),
    (_S.CLAIMED, _E.REVOKE): (_S.REVOKED, (_A.SEND_ABORT,)),
    (_S.CLAIMED, _E.LOST): (_S.FAILED_DRAINED, (_A.EMIT_FAILED,)),
    (_S.FAILED, _E.FIN): (_S.FAILED, ()),
    (_S.FAILED, _E.PEER_ABORT): (_S.FAILED, ()),
    (_S.FAILED, _E.DRAINED): (_S.FAILED_DRAINED, ()),
    (_S.FAILED, _E.LOST): (_S.FAILED_DRAINED, ()),
    (_S.FAILED, _E.REVOKE): (_S.REVOKED, ()),
    (_S.FAILED_DRAINED, _E.REVOKE): (_S.FORGOTTEN, ()),
    (_S.FAILED_DRAINED, _E.LOST): (_S.FAILED_DRAINED, ()),
    (_S.REVOKED, _E.FIN): (_S.REVOKED, ()),
    (_S.REVOKED, _E.PEER_ABORT): (_S.REVOKED, ()),
    (_S.REVOKED, _E.REVOKE): (_S.REVOKED, ()),
    (_S.REVOKED, _E.DRAINED): (_S.FORGOTTEN, ()),
    (_S.REVOKED, _E.LOST): (_S.FORGOTTEN, ()),
}
_WRITABLE = (_S.GRANTED, _S.CLAIMED)


@dataclass(slots=True)
class GrantedTransfer:
    """The receiver's side of one transfer. One caller at a time (the owner's lock)."""

    key: TransferKey
    source: int
    """Incarnation of the only peer that may begin it."""
    tables: tuple[tuple[int, ...], ...]
    """Block tables from token 0, one per group; blocks of the skipped tokens are never written."""
    num_tokens: int
    skip_tokens: int
    num_layers: int
    state: GrantState = GrantState.EXPECTED
    generation: int = 0
    num_arrived: int = 0
    digests: list[int] = field(default_factory=list)
    fin: Fin | None = None
    failure: str = ""
    next_token: list[int] = field(default_factory=list)
    windows: list[tuple[int, ...]] = field(default_factory=list)
    story: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_token = [self.skip_tokens] * self.num_layers

    @property
    def is_forgotten(self) -> bool:
        return self.state in (GrantState.FORGOTTEN, GrantState.ADOPTED)

    @property
    def is_revoked(self) -> bool:
        """Whether the caller has taken its blocks back: what a window still holds is then owed to it as proof."""
        return self.state in (GrantState.REVOKED, GrantState.FORGOTTEN)

    @property
    def open_blocks(self) -> tuple[int, ...]:
        """The blocks that are being written at this moment."""
        return tuple(block for window in self.windows for block in window)

    def on(self, event: GrantEvent) -> _Actions:
        """The actions of `event`, to be performed in order. Raises `OutOfOrder` when this state forbids it."""
        entry = TABLE.get((self.state, event))
        if entry is None:
            story = " ".join(self.story) or "expect"
            raise OutOfOrder(f"transfer {self.key!r}: {event.name} in {self.state.name} after {story}")
        if len(self.story) < MAX_STORY:
            self.story.append(event.name)
        self.state, actions = entry
        return actions

    def fail(self, failure: str) -> _Actions:
        """BAD with its reason; nothing when the transfer cannot fail any more."""
        if self.state not in _WRITABLE:
            return ()
        self.failure = failure
        return self.on(GrantEvent.BAD)

    def open_window(self, unit: Unit, blocks: tuple[int, ...]) -> bool:
        """Whether the unit may be written now. True opens a window on `blocks`: exactly one `close_window` must
        follow."""
        if self.state not in _WRITABLE or unit.generation != self.generation:
            return False
        self.windows.append(blocks)
        return True

    def misfit_of(self, unit: Unit) -> str | None:
        """None when the unit is the next one and continues each of its layers, else what is wrong with it."""
        layers = range(unit.first_layer, unit.first_layer + unit.num_layers)
        if unit.index != self.num_arrived:
            return "unit_order"
        if layers.stop > self.num_layers or unit.first_token + unit.num_tokens > self.num_tokens:
            return "unit_range"
        if any(self.next_token[layer] != unit.first_token for layer in layers):
            return "unit_coverage"
        return None

    def close_window(self, unit: Unit, blocks: tuple[int, ...], digest: int | None) -> tuple[_Actions, tuple[int, ...]]:
        """Ends the window; returns the actions due and the blocks now proven to a caller that revoked meanwhile."""
        self.windows.remove(blocks)
        if self.state not in _WRITABLE:
            return (), blocks if self.is_revoked else ()
        self.num_arrived += 1
        if digest is not None:
            self.digests.append(digest)
        for layer in range(unit.first_layer, unit.first_layer + unit.num_layers):
            self.next_token[layer] = unit.first_token + unit.num_tokens
        return self.settle(), ()

    def on_fin(self, fin: Fin) -> _Actions:
        """Takes FIN and settles. Raises `OutOfOrder`."""
        actions = self.on(GrantEvent.FIN)
        if self.state is not GrantState.CLAIMED:
            return actions
        self.fin = fin
        return actions + self.settle()

    def settle(self) -> _Actions:
        """COMPLETE or BAD once as many units have arrived as FIN counts; nothing before."""
        if self.state is not GrantState.CLAIMED or self.fin is None:
            return ()
        if self.fin.generation != self.generation or len(self.fin.units) != 1:
            return self.fail("fin_mismatch")
        if self.num_arrived < self.fin.units[0]:
            return ()
        if self.num_arrived > self.fin.units[0] or any(token != self.num_tokens for token in self.next_token):
            return self.fail("incomplete")
        if self.fin.digests and unpack_u32(self.fin.digests) != tuple(self.digests):
            return self.fail("digest")
        return self.on(GrantEvent.COMPLETE)
