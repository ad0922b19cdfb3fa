"""KVSender and KVReceiver joined in one process, over each transport: hand-over, strangers, hostile frames, the end."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import torch

from kv_transfer.channel import (
    Adopted,
    Arrived,
    Granted,
    KVReceiver,
    KVSender,
    KVSource,
    PeerUp,
    SourceUp,
    TransferFailed,
)
from kv_transfer.errors import PeerLost
from kv_transfer.layout import KVLayout
from kv_transfer.messages import (
    IDENTITY_CODEC,
    LANE_PLANE,
    MAX_META_BYTES,
    SESSION_CODEC,
    SESSION_PLANE,
    Drained,
    Grant,
    KVIdentity,
    LaneHello,
    SessionHello,
    Unit,
)
from kv_transfer.pool import SharedPool
from kv_transfer.staging import gather_unit, view_cache
from kv_transfer.transports.base import Transport
from kv_transfer.transports.select import make_transport
from kv_transfer.wire import Connection, KeyRing, client_steps, dial
from tests.support.kv_peer import make_cache

HOST = "127.0.0.1"
RING = KeyRing((("k", b"k" * 32),))
LAYOUT = KVLayout(4, 2, 8, 4, "fp32")
OTHER_BLOCKS = KVLayout(4, 2, 8, 8, "bf16")
KEY = (b"s" * 16, 3)
TOKENS = 30
SOURCE_BLOCKS, TARGET_BLOCKS = [7, 0, 3, 2, 9, 1, 4, 8], [5, 1, 0, 6]


@dataclass
class Channel:
    """Both ends and what they have reported."""

    transport: Transport
    sender: KVSender
    receiver: KVReceiver
    source: torch.Tensor
    target: torch.Tensor
    sent: list[object] = field(default_factory=list)
    received: list[object] = field(default_factory=list)
    pool: SharedPool | None = None
    port: int = 0

    async def open(self) -> None:
        self.port = await self.sender.start()
        await self.receiver.start()
        self.receiver.set_sources([KVSource(1, HOST, self.port)])
        await until(lambda: self.receiver.open_sources() == {1} and self.sender.open_peers() == (2,))

    async def close(self) -> None:
        await self.receiver.close()
        await self.sender.close()
        if self.pool is not None:
            self.pool.close()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        await asyncio.sleep(0.002)


def make_channel(
    name: Any, receiver: KVIdentity | None = None, ring: KeyRing = RING, verify: Any = "full",
    layout: KVLayout = OTHER_BLOCKS,
) -> Channel:  # fmt: skip
    source = torch.randn(4, 10, 2, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    pool = SharedPool() if name == "shm" else None
    target = make_cache(layout, 8, pool)
    sent: list[object] = []
    received: list[object] = []
    transport = make_transport(name, HOST, pool)
    offer: Any = {"host_id": "here", "transports": (name,)}
    receiver = receiver or KVIdentity(2, "digest", layout, **offer)
    return Channel(
        transport,
        KVSender(
            identity=KVIdentity(1, "digest", LAYOUT, verify=verify, **offer), ring=RING, data=source, host=HOST,
            emit=sent.append, transports={transport.name: transport},
        ),
        KVReceiver(
            identity=receiver, ring=ring, data=target, emit=received.append, transports={transport.name: transport}
        ),
        source, target, sent, received, pool,
    )  # fmt: skip


@pytest.fixture(params=["loopback", "gloo", "shm"])
def name(request: pytest.FixtureRequest) -> str:
    transport: str = request.param
    return transport


def of(events: list[object], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def push_all(sender: KVSender, skip: int = 0) -> None:
    for first in range(skip, TOKENS, 7):
        for layer in range(0, 4, 2):
            sender.push(KEY, [SOURCE_BLOCKS], first, min(7, TOKENS - first), layer, 2)


async def receive_forever(connection: Connection) -> None:
    while True:
        await connection.receive()


def is_equal(channel: Channel, skip: int = 0) -> bool:
    wanted = gather_unit(view_cache(channel.source), [SOURCE_BLOCKS], skip, TOKENS - skip, 0, 4, torch.bfloat16)
    return torch.equal(gather_unit(view_cache(channel.target), [TARGET_BLOCKS], skip, TOKENS - skip, 0, 4), wanted)


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("skip", [0, 5])
def test_a_prompt_is_handed_over(name: str, skip: int, verify: str):
    async def scenario() -> None:
        channel = make_channel(name, verify=verify)
        await channel.open()
        before = channel.target.clone()
        channel.receiver.expect(KEY, 1, [TARGET_BLOCKS], TOKENS, skip)
        channel.sender.begin(KEY, 2, TOKENS, skip)
        push_all(channel.sender, skip)
        channel.sender.finish(KEY, b"first token")
        await until(lambda: bool(of(channel.sent, Adopted) and of(channel.received, Arrived)))
        (arrived,), (adopted,) = of(channel.received, Arrived), of(channel.sent, Adopted)
        assert (arrived.key, arrived.meta) == (KEY, b"first token")
        assert is_equal(channel, skip)
        if skip:
            assert torch.equal(
                gather_unit(view_cache(channel.target), [TARGET_BLOCKS], 0, skip, 0, 4),
                gather_unit(view_cache(before), [TARGET_BLOCKS], 0, skip, 0, 4),
            )
        assert [type(e) for e in channel.sent] == [PeerUp, Granted, Adopted]
        assert [type(e) for e in channel.received] == [SourceUp, Arrived]
        assert sum(unit.num_bytes for unit in adopted.trace.units) == OTHER_BLOCKS.unit_bytes(TOKENS - skip, 4)
        assert [u.num_bytes for u in arrived.trace.units] == [u.num_bytes for u in adopted.trace.units]
        assert all(unit.pushed_us <= unit.sent_us for unit in adopted.trace.units)
        await channel.close()

    asyncio.run(scenario())


def test_closing_leaves_no_thread_and_fails_what_is_open(name: str):
    async def scenario() -> None:
        channel = make_channel(name)
        await channel.open()
        channel.receiver.expect(KEY, 1, [TARGET_BLOCKS], TOKENS, 0)
        channel.sender.begin(KEY, 2, TOKENS, 0)
        await until(lambda: bool(of(channel.sent, Granted)))
        await channel.close()
        assert [e.reason for e in of(channel.sent, TransferFailed)] == ["peer_lost"]
        assert [e.reason for e in of(channel.received, TransferFailed)] == ["peer_lost"]
        assert channel.receiver.revoke(KEY, "over") == ()
        await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("kv-")])
        channel.sender.push(KEY, [SOURCE_BLOCKS], 0, 7, 0, 2)
        channel.sender.finish(KEY, b"")
        channel.sender.abort(KEY, "late")

    asyncio.run(scenario())


def test_misuse_is_refused_at_the_call(name: str):
    async def scenario() -> None:
        channel = make_channel(name)
        await channel.open()
        channel.receiver.expect(KEY, 1, [TARGET_BLOCKS], TOKENS, 0)
        channel.sender.begin(KEY, 2, TOKENS, 0)
        for part in ((1, 7, 0, 2), (0, 31, 0, 2), (0, 7, 3, 2), (0, 0, 0, 2)):
            with pytest.raises(ValueError):
                channel.sender.push(KEY, [SOURCE_BLOCKS], *part)
        with pytest.raises(ValueError, match="before every layer"):
            channel.sender.finish(KEY, b"")
        with pytest.raises(ValueError, match="limit"):
            channel.sender.finish(KEY, b"x" * (MAX_META_BYTES + 1))
        push_all(channel.sender)
        channel.sender.finish(KEY, b"x" * MAX_META_BYTES)
        await until(lambda: bool(of(channel.received, Arrived)))
        assert is_equal(channel)
        await channel.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("identity", "ring"),
    [
        (KVIdentity(2, "digest", LAYOUT, transports=("loopback",)), KeyRing((("k", b"x" * 32),))),
        (KVIdentity(2, "digest", LAYOUT, transports=("loopback",)), KeyRing((("other", b"k" * 32),))),
        (KVIdentity(2, "another", LAYOUT, transports=("loopback",)), RING),
        (KVIdentity(2, "digest", KVLayout(5, 2, 8, 4, "fp32"), transports=("loopback",)), RING),
        (KVIdentity(2, "digest", KVLayout(4, 1, 8, 4, "fp32"), transports=("loopback",)), RING),
        (KVIdentity(2, "digest", LAYOUT, tp=2, transports=("loopback",)), RING),
        (KVIdentity(2, "digest", LAYOUT, transports=("nccl",)), RING),
    ],
    ids=["secret", "key id", "digest", "layers", "heads", "tp", "transport"],
)
def test_a_stranger_is_refused_by_both_ends(identity: KVIdentity, ring: KeyRing, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        channel = make_channel("loopback", receiver=identity, ring=ring)
        port = await channel.sender.start()
        body = IDENTITY_CODEC.encode(SessionHello(identity, 1, b"12345678"))
        with pytest.raises(Exception, match=r"secret|refused|connection ended"):
            await dial(HOST, port, client_steps(ring, SESSION_PLANE, body, lambda _: None), 1 << 20)
        await channel.receiver.start()
        channel.receiver.set_sources([KVSource(1, HOST, port)])
        await until(lambda: caplog.text.count("cannot dial") >= 3)
        assert channel.receiver.open_sources() == frozenset()
        assert channel.sender.open_peers() == ()
        assert (channel.sent, channel.received) == ([], [])
        await channel.close()

    asyncio.run(scenario())


def test_another_incarnation_at_the_address_is_not_taken_for_the_source():
    async def scenario() -> None:
        channel = make_channel("loopback")
        port = await channel.sender.start()
        await channel.receiver.start()
        channel.receiver.set_sources([KVSource(9, HOST, port)])
        body = IDENTITY_CODEC.encode(
            SessionHello(KVIdentity(2, "digest", LAYOUT, transports=("loopback",)), 9, b"12345678")
        )
        with pytest.raises(Exception, match="wrong_incarnation"):
            await dial(HOST, port, client_steps(RING, SESSION_PLANE, body, lambda _: None), 1 << 20)
        assert channel.receiver.open_sources() == frozenset()
        channel.receiver.set_sources([KVSource(1, HOST, port)])
        await until(lambda: channel.receiver.open_sources() == {1})
        await channel.close()

    asyncio.run(scenario())


def test_a_lane_without_its_session_is_refused():
    async def scenario() -> None:
        channel = make_channel("loopback")
        await channel.open()
        for session in (b"12345678", next(iter(channel.sender._links.values())).session):
            hello = IDENTITY_CODEC.encode(LaneHello(2, session, b"87654321", 0, 0))
            with pytest.raises(Exception, match="no_session"):
                await dial(HOST, channel.port, client_steps(RING, LANE_PLANE, hello, lambda _: None), 8 << 10)
        assert channel.receiver.open_sources() == {1}
        await channel.close()

    asyncio.run(scenario())


def test_a_session_that_breaks_the_protocol_is_closed_and_the_others_live_on():
    async def scenario() -> None:
        channel = make_channel("loopback")
        await channel.open()
        identity = KVIdentity(77, "digest", LAYOUT, transports=("loopback",))
        body = IDENTITY_CODEC.encode(SessionHello(identity, 1, b"12345678"))
        for payload in (
            b"\xc1 no message", b"\x91" * 1000, SESSION_CODEC.encode(Drained(b"s" * 16, 1, 1, (0,))),
        ):  # fmt: skip
            hostile = await dial(HOST, channel.port, client_steps(RING, SESSION_PLANE, body, lambda _: None), 1 << 20)
            hostile.send(SESSION_CODEC.encode(Grant(b"s" * 16, 1, 1, b"")))
            hostile.send(payload)
            with pytest.raises(PeerLost):
                await asyncio.wait_for(receive_forever(hostile), 5)
            hostile.abort()
        assert channel.sender.open_peers() == (2,)
        assert channel.receiver.open_sources() == {1}
        await channel.close()

    asyncio.run(scenario())


def test_a_second_session_of_the_same_process_replaces_the_first():
    async def scenario() -> None:
        channel = make_channel("loopback")
        await channel.open()
        channel.receiver.expect(KEY, 1, [TARGET_BLOCKS], TOKENS, 0)
        channel.sender.begin(KEY, 2, TOKENS, 0)
        identity = KVIdentity(2, "digest", LAYOUT, transports=("loopback",))
        body = IDENTITY_CODEC.encode(SessionHello(identity, 1, b"12345678"))
        second = await dial(HOST, channel.port, client_steps(RING, SESSION_PLANE, body, lambda _: None), 1 << 20)
        await until(lambda: bool(of(channel.sent, TransferFailed)))
        await until(lambda: bool(of(channel.received, TransferFailed)))
        second.abort()
        await until(lambda: channel.receiver.open_sources() == {1} and channel.sender.open_peers() == (2,))
        await channel.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("breaker", ["sender", "receiver"])
def test_links_that_break_are_replaced_and_leave_nothing_behind(name: str, breaker: str):
    def num_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    def num_threads() -> int:
        return sum(thread.name.startswith("kv-") for thread in threading.enumerate())

    async def scenario() -> None:
        channel = make_channel(name)
        await channel.open()
        fds, threads = num_fds(), num_threads()
        for round_number in range(10):
            links = channel.sender._links if breaker == "sender" else channel.receiver._links
            (link,) = links.values()
            link.end("broken by the test")
            await until(lambda count=round_number + 2: len(of(channel.received, SourceUp)) == count)
            await until(lambda count=round_number + 2: len(of(channel.sent, PeerUp)) == count)
        channel.receiver.expect(KEY, 1, [TARGET_BLOCKS], TOKENS, 0)
        channel.sender.begin(KEY, 2, TOKENS, 0)
        push_all(channel.sender)
        channel.sender.finish(KEY, b"")
        await until(lambda: bool(of(channel.received, Arrived)))
        assert is_equal(channel)
        await until(lambda: num_threads() == threads)
        await until(lambda: num_fds() <= fds)
        await channel.close()

    asyncio.run(scenario())


def test_every_listener_is_on_the_given_host(name: str):
    async def scenario() -> None:
        channel = make_channel(name)
        await channel.open()
        listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) == {HOST}
        await channel.close()

    asyncio.run(scenario())


def test_a_prefill_worker_that_lies_about_its_units_loses_its_link_or_its_transfer():
    def unit(channel: Channel, **changes: int) -> Unit:
        (receiving,) = channel.receiver._receivings.values()
        fields = {"index": 0, "first_token": 0, "num_tokens": 7, "first_layer": 0, "num_layers": 4} | changes
        num_bytes = changes.get("num_bytes", OTHER_BLOCKS.unit_bytes(fields["num_tokens"], fields["num_layers"]))
        return Unit(*KEY, receiving.grant.generation, **(fields | {"num_bytes": num_bytes}))

    async def scenario(changes: dict[str, int], reason: str) -> None:
        channel = make_channel("loopback")
        await channel.open()
        channel.receiver.expect(KEY, 1, [TARGET_BLOCKS], TOKENS, 0)
        channel.sender.begin(KEY, 2, TOKENS, 0)
        await until(lambda: bool(of(channel.sent, Granted)))
        (link,) = channel.sender._links.values()
        lie = unit(channel, **changes)
        link.send_lane(lie)
        assert link.lane is not None
        assert link.lane._pair is not None
        link.lane._pair.send(torch.zeros(lie.num_bytes, dtype=torch.uint8))
        await until(lambda: bool(of(channel.received, TransferFailed)))
        assert [e.reason for e in of(channel.received, TransferFailed)] == [reason]
        assert channel.receiver.revoke(KEY, "over") == ()
        assert float(channel.target.abs().sum()) == 0, "nothing of it was written"
        await channel.close()

    for changes, reason in (
        ({"num_bytes": 8}, "peer_lost"),
        ({"first_token": 24}, "unit_range"),
        ({"first_layer": 1}, "unit_range"),
        ({"first_token": 3}, "unit_coverage"),
        ({"index": 1}, "unit_order"),
    ):
        asyncio.run(scenario(changes, reason))
