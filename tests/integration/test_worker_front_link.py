"""The worker's end of the front link over real sockets: who may dial, order under congestion, heartbeats."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kv_transfer.errors import PeerLost, PeerRefused, TransferError
from kv_transfer.wire import Connection, KeyRing, client_steps, dial
from workers.protocol import (
    FRONT_CODEC,
    FRONT_PLANE,
    IDENTITY_CODEC,
    Accept,
    Cache,
    DecodeTimings,
    Delta,
    End,
    Heartbeat,
    IngressIdentity,
    Resume,
    Seen,
    Tokens,
    WorkerIdentity,
)
from workers.replica.link import MAX_NEWS, MAX_UNSENT_BYTES, FrontLink, Inbound, LinkDown, LinkUp, NewsLost

pytestmark = pytest.mark.integration
RING = KeyRing((("k1", b"s" * 32),))
S = b"s" * 16
WORKER = WorkerIdentity(
    incarnation=11, role="decode", model_id="m", model_digest="d", pid=1, ranks=1, block_tokens=16, blocks_total=10,
    max_context_tokens=100, headroom_blocks=4, kv_bytes_per_token=8,
)  # fmt: skip


class Desk:
    """Stands for the engine thread: writes down what is delivered."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Inbound]] = []

    def deliver(self, ingress: int, message: Inbound) -> None:
        self.heard.append((ingress, message))


DialWorker = Callable[..., Awaitable[Connection]]


@asynccontextmanager
async def open_link() -> AsyncIterator[tuple[FrontLink, Desk, DialWorker]]:
    """A listening link, what it delivers, and a function that dials it; whatever was dialled is closed at the end."""
    desk, dialled = Desk(), list[Connection]()
    link = FrontLink(WORKER, RING, "127.0.0.1", desk.deliver, lambda: 7)
    port = await link.start()

    async def dial_it(incarnation: int = 5, wanted: int = 0, ring: KeyRing = RING) -> Connection:
        dialled.append(await dial_worker(port, incarnation, wanted, ring))
        return dialled[-1]

    try:
        yield link, desk, dial_it
    finally:
        await link.close()
        for connection in dialled:
            connection.abort()
        await asyncio.sleep(0)


async def dial_worker(port: int, incarnation: int, wanted: int, ring: KeyRing) -> Connection:
    body = IDENTITY_CODEC.encode(IngressIdentity(incarnation, wanted))
    return await dial(
        "127.0.0.1", port, client_steps(ring, FRONT_PLANE, body, lambda _: None), FRONT_CODEC.max_frame_bytes
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def hear(connection: Connection, kind: type) -> object:
    async with asyncio.timeout(5):
        while not isinstance(message := FRONT_CODEC.decode(await connection.receive()), kind):
            continue
        return message


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_messages_reach_the_engine_thread_in_order_with_their_ingress() -> None:
    async def scenario() -> None:
        async with open_link() as (_, desk, dial_it):
            connection = await dial_it()
            sent = [Resume((), complete=True), Seen(S, 1), Seen(S, 2)]
            for message in sent:
                connection.send(FRONT_CODEC.encode(message))
            await until(lambda: len(desk.heard) == 4)
            assert desk.heard == [(5, LinkUp()), *((5, message) for message in sent)]
            connection.close()
            await until(lambda: desk.heard[-1] == (5, LinkDown()))

    run(scenario)


@pytest.mark.parametrize("ring", [KeyRing((("k1", b"x" * 32),)), KeyRing((("k9", b"s" * 32),))])
def test_who_does_not_hold_the_secret_is_not_heard(ring: KeyRing) -> None:
    async def scenario() -> None:
        async with open_link() as (_, desk, dial_it):
            with pytest.raises(TransferError):
                await dial_it(ring=ring)
            assert desk.heard == []

    run(scenario)


def test_an_ingress_that_means_another_worker_is_refused() -> None:
    async def scenario() -> None:
        async with open_link() as (_, desk, dial_it):
            with pytest.raises(PeerRefused, match="wrong_incarnation"):
                await dial_it(wanted=12)
            assert desk.heard == []

    run(scenario)


def test_heartbeats_come_by_themselves_and_tell_the_engine_s_idle_time() -> None:
    async def scenario() -> None:
        async with open_link() as (_, _, dial_it):
            assert await hear(await dial_it(), Heartbeat) == Heartbeat(7)

    run(scenario)


def test_a_new_connection_of_the_same_ingress_takes_the_place_of_the_old_one() -> None:
    async def scenario() -> None:
        async with open_link() as (link, desk, dial_it):
            old = await dial_it()
            new = await dial_it()
            with pytest.raises(PeerLost):
                await hear(old, Accept)
            link.send({5: [Accept(S, 0, 0, 0)]})
            assert await hear(new, Accept) == Accept(S, 0, 0, 0)
            assert (5, LinkDown()) not in desk.heard, "the ingress was never gone"

    run(scenario)


def test_a_congested_link_merges_tokens_and_keeps_accept_tokens_end_in_order() -> None:
    async def scenario() -> None:
        async with open_link() as (link, desk, dial_it):
            connection = await dial_it()
            await until(lambda: desk.heard == [(5, LinkUp())])
            num_streams, num_steps = 64, 3000
            streams = [secrets.token_bytes(16) for _ in range(num_streams)]
            link.send({5: [Accept(stream, 0, 0, 0) for stream in streams]})
            for step in range(num_steps):  # nobody reads meanwhile: the socket fills, then deltas merge
                link.send({5: [Tokens(tuple(Delta(stream, 0, step, (step,)) for stream in streams))]})
            link.send({5: [End(stream, 0, num_steps, "stop", DecodeTimings()) for stream in streams]})
            count, num_frames = dict.fromkeys(streams, 0), 0
            accepted, ended = set(), set()
            async with asyncio.timeout(60):
                while len(ended) < num_streams:
                    message = FRONT_CODEC.decode(await connection.receive())
                    num_frames += 1
                    if isinstance(message, Accept):
                        accepted.add(message.stream)
                    elif isinstance(message, Tokens):
                        for delta in message.deltas:
                            assert delta.stream in accepted
                            assert delta.position == count[delta.stream], "a gap"
                            count[delta.stream] += len(delta.tokens)
                    elif isinstance(message, End):
                        assert count[message.stream] == message.count, "END came ahead of its tokens"
                        ended.add(message.stream)
            assert num_frames < num_steps, f"{num_frames} frames for {num_steps} steps: nothing was merged"
            assert MAX_UNSENT_BYTES > 0

    run(scenario)


def test_cache_news_that_pile_up_are_dropped_and_asked_for_again() -> None:
    async def scenario() -> None:
        async with open_link() as (link, desk, dial_it):
            await dial_it()
            await until(lambda: desk.heard == [(5, LinkUp())])
            (peer,) = link._peers.values()
            for _ in range(MAX_NEWS):
                link._add(peer, Cache(False, b"a" * 16, b""))
            assert len(peer.news) == MAX_NEWS
            link._add(peer, Cache(False, b"b" * 16, b""))
            assert peer.news == []
            assert desk.heard[-1] == (5, NewsLost())
            link._add(peer, Cache(False, b"c" * 16, b""))
            link._add(peer, Cache(True, b"d" * 16, b""))
            assert [news.added[:1] for news in peer.news] == [b"d"], "what came before a whole answer is void"

    run(scenario)


def test_garbage_after_the_handshake_ends_the_connection_and_only_that() -> None:
    async def scenario() -> None:
        async with open_link() as (_, desk, dial_it):
            bad = await dial_it(incarnation=6)
            bad._writer.write(b"\xff\xff\xff\x7f" + b"x" * 100)
            await until(lambda: (6, LinkDown()) in desk.heard)
            good = await dial_it(incarnation=7)
            good.send(FRONT_CODEC.encode(Seen(S, 0)))
            await until(lambda: (7, Seen(S, 0)) in desk.heard)

    run(scenario)
