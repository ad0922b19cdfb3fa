"""The messages of sessions and lanes, exactly as docs/protocol.md lists them, with their limits.

Pure data. A session joins a decode leader (dials) and a prefill leader; a lane joins one rank of each. Block lists and
digests are packed little-endian u32. Times never travel.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from kv_transfer.choice import Choice, Offer, Verify, choose_transport
from kv_transfer.codec import Between, Codec, Size
from kv_transfer.errors import FrameInvalid
from kv_transfer.layout import MAX_UNIT_BYTES, NULL_BLOCK, KVLayout

SESSION_PLANE = "session"
LANE_PLANE = "lane"
MAX_META_BYTES = 64 << 10
MAX_TRANSFER_TOKENS = 1 << 20

StreamId = Annotated[bytes, Size(16, 16)]
Attempt = Annotated[int, Between(0, 1 << 30)]
Incarnation = Annotated[int, Between(0, (1 << 64) - 1)]
LinkId = Annotated[bytes, Size(8, 8)]
Generation = Annotated[int, Between(1, 1 << 62)]
Reason = Annotated[str, Size(1, 64)]
UnitCount = Annotated[int, Between(0, 1 << 16)]
Rank = Annotated[int, Between(0, 1023)]


class TransferKey(NamedTuple):
    """One attempt of one stream; equal to the pair that the front link uses."""

    stream: bytes
    attempt: int

    def __repr__(self) -> str:
        return f"{self.stream.hex()[:8]}#{self.attempt}"


# --- identities, proven in the handshake ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """What a leader proves: who it is and which KV caches it can exchange."""

    incarnation: Incarnation
    model_digest: Annotated[str, Size(1, 128)]
    layout: KVLayout
    tp: Annotated[int, Between(1, 1024)] = 1
    host_id: Annotated[str, Size(0, 128)] = ""
    transports: Annotated[tuple[Annotated[str, Size(1, 16)], ...], Size(1, 8)] = ("gloo",)
    verify: Verify = "full"
    """Prefill: when FIN carries digests (`choice.has_digests`)."""

    def choose_transport(self, other: "KVIdentity") -> Choice | None:
        """How bytes move between the two; None where nothing that both have reaches. Both ends choose the same."""
        return choose_transport(Offer(self.transports, self.host_id), Offer(other.transports, other.host_id))

    def refusal_of(self, other: "KVIdentity") -> str | None:
        """None when the two may exchange KV caches, else the reason code of the refusal."""
        if other.model_digest != self.model_digest:
            return "model_digest"
        difference = self.layout.incompatible_with(other.layout)
        if difference is not None:
            return f"layout: {difference}"
        if other.tp != self.tp:
            return f"tp {self.tp} against {other.tp}"
        if self.choose_transport(other) is None:
            return f"transports {','.join(self.transports)} against {','.join(other.transports)}"[:128]
        return None


@dataclass(frozen=True, slots=True)
class SessionHello:
    """The dialler's body: its identity, whom it means to reach, and the random id of this session."""

    identity: KVIdentity
    wanted: Incarnation
    session: LinkId


@dataclass(frozen=True, slots=True)
class LaneHello:
    """The dialler's body of a lane: the open session it belongs to and its own random id."""

    incarnation: Incarnation
    session: LinkId
    lane: LinkId
    source_rank: Rank
    target_rank: Rank


IDENTITY_CODEC = Codec(KVIdentity, SessionHello, LaneHello, max_frame_bytes=16 << 10, max_array=1024)


# --- session --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """P to D: ready to compute; asks for the grant."""

    stream: StreamId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Grant:
    """D to P, at once: units of this generation are written into these blocks. Generations rise per receiver."""

    stream: StreamId
    attempt: Attempt
    generation: Generation
    tables: Annotated[bytes, Size(0, 512 << 10)]
    """See `pack_tables`."""


@dataclass(frozen=True, slots=True)
class Fin:
    """P to D: every unit is sent. `digests` holds one u32 per unit in order, or nothing when digests are off."""

    stream: StreamId
    attempt: Attempt
    generation: Generation
    units: Annotated[tuple[UnitCount, ...], Size(1, 1024)]
    """Units per lane."""
    digests: Annotated[bytes, Size(0, 256 << 10)]
    meta: Annotated[bytes, Size(0, MAX_META_BYTES)]


@dataclass(frozen=True, slots=True)
class Adopted:
    """D to P: the KV cache is whole and verified; from here on losing P means nothing."""

    stream: StreamId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Abort:
    stream: StreamId
    attempt: Attempt
    reason: Reason


@dataclass(frozen=True, slots=True)
class Drained:
    """P to D: no unit of this generation is announced any more; `units` per lane were, and are sent."""

    stream: StreamId
    attempt: Attempt
    generation: Generation
    units: Annotated[tuple[UnitCount, ...], Size(1, 1024)]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Both ways, each second, off the engine thread."""


SESSION_CODEC = Codec(Begin, Grant, Fin, Adopted, Abort, Drained, Heartbeat, max_frame_bytes=1 << 20, max_array=1024)
SessionMessage = Begin | Grant | Fin | Adopted | Abort | Drained | Heartbeat


# --- lane -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blob:
    """Both ways while a lane opens: the transport's address (gloo: 170 bytes), opaque to us."""

    data: Annotated[bytes, Size(1, 4096)]


@dataclass(frozen=True, slots=True)
class Unit:
    """P's rank to D's rank: the bytes of this unit follow on the lane's data pair, in the order of the notices."""

    stream: StreamId
    attempt: Attempt
    generation: Generation
    index: UnitCount
    first_token: Annotated[int, Between(0, MAX_TRANSFER_TOKENS)]
    num_tokens: Annotated[int, Between(1, MAX_TRANSFER_TOKENS)]
    first_layer: Annotated[int, Between(0, 1024)]
    num_layers: Annotated[int, Between(1, 1024)]
    num_bytes: Annotated[int, Between(1, MAX_UNIT_BYTES)]


LANE_CODEC = Codec(Blob, Unit, max_frame_bytes=8 << 10, max_array=16)
LaneMessage = Blob | Unit


# --- packed lists ---------------------------------------------------------------------------------------------------


def pack_u32(values: Sequence[int]) -> bytes:
    """Numbers below 2**32 as little-endian u32 bytes."""
    packed = array("I", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_u32`; raises `FrameInvalid` when the length is no multiple of four."""
    if len(packed) % 4:
        raise FrameInvalid(f"a packed list needs a multiple of 4 bytes, got {len(packed)}")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def pack_tables(tables: Sequence[Sequence[int]], num_pages: int) -> bytes:
    """The first `num_pages` pages of each table as u32: how many of them have no block, then the blocks of the rest."""
    packed: list[int] = []
    for table in tables:
        blocks = [block for block in table[:num_pages] if block != NULL_BLOCK]
        packed += (num_pages - len(blocks), *blocks)
    return pack_u32(packed)


def unpack_tables(packed: bytes, num_tables: int, num_pages: int) -> tuple[tuple[int, ...], ...]:
    """The inverse of `pack_tables`; raises `FrameInvalid` unless there are so many tables of so many pages, and no
    block twice."""
    numbers, tables = unpack_u32(packed), list[tuple[int, ...]]()
    place = 0
    for _ in range(num_tables):
        num_null = numbers[place] if place < len(numbers) else num_pages + 1
        end = place + 1 + num_pages - num_null
        if num_null > num_pages or end > len(numbers):
            raise FrameInvalid(f"a grant of {len(numbers)} numbers has no {num_tables} tables of {num_pages} pages")
        tables.append((NULL_BLOCK,) * num_null + numbers[place + 1 : end])
        place = end
    blocks = [block for table in tables for block in table if block != NULL_BLOCK]
    if place != len(numbers) or len(set(blocks)) != len(blocks):
        raise FrameInvalid(f"a grant of {num_tables} tables of {num_pages} pages is too long or names a block twice")
    return tuple(tables)
