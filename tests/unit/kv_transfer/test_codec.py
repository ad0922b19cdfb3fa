"""The only decoder that bytes of a peer meet: round trips, limits, hostile input."""

import struct
from dataclasses import dataclass
from typing import Annotated, Literal

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.codec import Between, Codec, Size
from kv_transfer.errors import FrameInvalid
from kv_transfer.layout import NULL_BLOCK, KVLayout, LayerGroup
from kv_transfer.messages import (
    IDENTITY_CODEC,
    LANE_CODEC,
    SESSION_CODEC,
    Begin,
    Fin,
    Grant,
    KVIdentity,
    SessionHello,
    Unit,
    pack_tables,
    pack_u32,
    unpack_tables,
    unpack_u32,
)


@dataclass(frozen=True, slots=True)
class Inner:
    number: Annotated[int, Between(0, 9)]


@dataclass(frozen=True, slots=True)
class Everything:
    number: Annotated[int, Between(-5, 5)]
    share: Annotated[float, Between(0.0, 1.0)]
    flag: bool
    name: Annotated[str, Size(1, 4)]
    raw: Annotated[bytes, Size(2, 2)]
    kind: Literal["a", "b"]
    maybe: Inner | None
    items: Annotated[tuple[Inner, ...], Size(0, 2)]


CODEC = Codec(Inner, Everything, max_frame_bytes=256, max_array=16)
GOOD = Everything(3, 0.5, True, "ab", b"xy", "b", Inner(1), (Inner(2), Inner(3)))


def plain(*fields: object) -> bytes:
    payload: bytes = msgpack.packb([1, *fields], use_bin_type=True)
    return payload


def test_round_trip_keeps_every_field_and_type():
    assert CODEC.decode(CODEC.encode(GOOD)) == GOOD


def test_an_int_is_accepted_where_a_float_is_declared():
    decoded = CODEC.decode(plain(3, 1, True, "ab", b"xy", "b", None, []))
    assert isinstance(decoded, Everything)
    assert type(decoded.share) is float


@pytest.mark.parametrize(
    "fields",
    [
        (6, 0.5, True, "ab", b"xy", "b", None, []),
        (True, 0.5, True, "ab", b"xy", "b", None, []),
        (3, 1.5, True, "ab", b"xy", "b", None, []),
        (3, float("nan"), True, "ab", b"xy", "b", None, []),
        (3, 0.5, 1, "ab", b"xy", "b", None, []),
        (3, 0.5, True, "", b"xy", "b", None, []),
        (3, 0.5, True, "abcde", b"xy", "b", None, []),
        (3, 0.5, True, b"ab", b"xy", "b", None, []),
        (3, 0.5, True, "ab", b"x", "b", None, []),
        (3, 0.5, True, "ab", b"xy", "c", None, []),
        (3, 0.5, True, "ab", b"xy", "b", [10], []),
        (3, 0.5, True, "ab", b"xy", "b", None, [[1], [2], [3]]),
        (3, 0.5, True, "ab", b"xy", "b", None, [[1, 2]]),
        (3, 0.5, True, "ab", b"xy", "b", None),
        (3, 0.5, True, "ab", b"xy", "b", None, [], 0),
    ],
)
def test_a_field_outside_its_type_or_bounds_is_refused(fields: tuple[object, ...]):
    with pytest.raises(FrameInvalid):
        CODEC.decode(plain(*fields))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 200,
        b"\x81" * 200,
        msgpack.packb({"a": 1}),
        msgpack.packb([2, 1]),
        msgpack.packb([-1, 1]),
        msgpack.packb([True, 1]),
        msgpack.packb([[0], 1]),
        msgpack.packb(7),
        b"\xdd" + struct.pack(">I", 1 << 31),
        b"\xdf" + struct.pack(">I", 1 << 31),
        b"\xc6" + struct.pack(">I", 1 << 31),
        b"\xc7\x01\x05\x00",
        b"\xd4\xff\x00",
        b"\xd6\xff\x00\x00\x00\x00",
        msgpack.packb([0, 1]) + b"\x00",
        b"\x92\x00\xa1\xff",
        b"x" * 257,
    ],
)
def test_hostile_payloads_are_refused_and_nothing_else_is_raised(payload: bytes):
    with pytest.raises(FrameInvalid):
        CODEC.decode(payload)


@settings(max_examples=300)
@given(st.binary(max_size=256))
def test_random_bytes_never_raise_anything_but_frame_invalid(payload: bytes):
    for codec in (CODEC, SESSION_CODEC, LANE_CODEC, IDENTITY_CODEC):
        try:
            codec.decode(payload)
        except FrameInvalid:
            pass


@settings(max_examples=200)
@given(st.integers(0, 60), st.integers(0, 7), st.sampled_from(["flip", "cut", "double"]))
def test_a_damaged_message_decodes_to_a_message_or_is_refused(position: int, bit: int, damage: str):
    payload = bytearray(SESSION_CODEC.encode(Fin(b"s" * 16, 3, 9, (4,), b"d" * 16, b"meta")))
    position %= len(payload)
    if damage == "flip":
        payload[position] ^= 1 << bit
    elif damage == "cut":
        del payload[position:]
    else:
        payload += payload[: position + 1]
    try:
        SESSION_CODEC.encode(SESSION_CODEC.decode(bytes(payload)))
    except FrameInvalid:
        pass


def test_a_message_over_the_frame_limit_is_not_encoded():
    with pytest.raises(FrameInvalid):
        Codec(Grant, max_frame_bytes=64).encode(Grant(b"s" * 16, 1, 1, b"b" * 64))


def test_a_type_the_wire_cannot_carry_is_a_programming_error():
    @dataclass
    class Bad:
        field: dict[str, int]

    with pytest.raises(TypeError):
        Codec(Bad)


def test_session_and_lane_messages_survive_the_wire(make_identity):
    session = [
        Begin(b"s" * 16, 1),
        Grant(b"s" * 16, 1, 5, pack_tables([[1, 2]], 2)),
        Fin(b"s" * 16, 1, 5, (3,), b"", b"m"),
    ]
    for message in session:
        assert SESSION_CODEC.decode(SESSION_CODEC.encode(message)) == message
    unit = Unit(b"s" * 16, 1, 5, 0, first_token=0, num_tokens=7, first_layer=0, num_layers=2, num_bytes=99)
    assert LANE_CODEC.decode(LANE_CODEC.encode(unit)) == unit
    grouped = KVLayout(3, 2, 8, 4, "fp32", groups=(LayerGroup((0, 2), 512), LayerGroup((1,))))
    hello = SessionHello(make_identity(1, layout=grouped), 2, b"12345678")
    decoded = IDENTITY_CODEC.decode(IDENTITY_CODEC.encode(hello))
    assert decoded == hello
    assert isinstance(decoded, SessionHello)
    assert isinstance(decoded.identity, KVIdentity)


@given(
    st.integers(0, 6).flatmap(lambda n: st.lists(st.integers(0, n), min_size=1, max_size=4).map(lambda gaps: (n, gaps)))
)
def test_tables_of_a_grant_survive_the_wire(sizes: tuple[int, list[int]]):
    num_pages, gaps = sizes
    numbers = iter(range(100))
    tables = [[NULL_BLOCK] * gap + [next(numbers) for _ in range(num_pages - gap)] for gap in gaps]
    longer = [[*table, 99] for table in tables]
    packed = pack_tables(longer, num_pages)
    assert unpack_tables(packed, len(tables), num_pages) == tuple(map(tuple, tables))
    assert len(packed) == 4 * (len(tables) + sum(num_pages - gap for gap in gaps))


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [0, 1, 2],
        [0, 1, 2, 0, 3],
        [0, 1, 2, 0, 3, 4, 5],
        [0, 1, 2, 3],
        [3, 0, 1, 2],
        [0, 1, 2, 0, 3, 1],
        [1, 7, 1, 7],
        [(1 << 32) - 1, 0, 1, 2],
    ],
)
def test_a_grant_that_does_not_add_up_is_refused(numbers: list[int]):
    """Two tables of two pages: too short, too long, more gaps than pages, a block twice."""
    with pytest.raises(FrameInvalid, match="2 tables of 2 pages"):
        unpack_tables(pack_u32(numbers), 2, 2)


def test_packed_lists_are_little_endian_and_refuse_a_torn_length():
    assert pack_u32([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert unpack_u32(pack_u32([0, 7, (1 << 32) - 1])) == (0, 7, (1 << 32) - 1)
    with pytest.raises(FrameInvalid):
        unpack_u32(b"\x00" * 5)
