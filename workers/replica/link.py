"""The worker's end of the front link: ingresses dial, frames go up and down, heartbeats never touch the engine thread.

Knows frames and connections; takes no decision about a request. Everything an ingress says goes to `deliver` (which
only queues it for the engine thread); everything the engine thread says comes through `send`.

A link with more than MAX_UNSENT_BYTES unsent gets no new frame: token deltas are merged per stream meanwhile, so that a
slow ingress costs memory in proportion to its streams and not to time.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.errors import TransferError
from kv_transfer.wire import Connection, KeyRing, establish, server_steps
from workers.protocol import (
    FRONT_CODEC,
    FRONT_PLANE,
    HEARTBEAT_S,
    IDENTITY_CODEC,
    LOST_S,
    Accept,
    Busy,
    Cache,
    Delta,
    DownMessage,
    Heartbeat,
    IngressIdentity,
    Load,
    Tokens,
    UpMessage,
    WorkerIdentity,
)

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 << 10
FLUSH_RETRY_S = 0.005
MAX_NEWS = 256
"""CACHE frames of 32 KiB that may wait for a congested link."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """An ingress has dialled."""


@dataclass(frozen=True, slots=True)
class NewsLost:
    """CACHE frames to this ingress were dropped: its link is congested. It needs everything again."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The connection of an ingress ended."""


Inbound = DownMessage | LinkUp | LinkDown | NewsLost
Deliver = Callable[[int, Inbound], None]


@dataclass(slots=True)
class _Peer:
    incarnation: int
    connection: Connection
    last_heard: float
    replies: list[UpMessage] = field(default_factory=list)
    deltas: dict[tuple[bytes, int], Delta] = field(default_factory=dict)
    others: list[UpMessage] = field(default_factory=list)
    load: Load | None = None
    news: list[UpMessage] = field(default_factory=list)
    retry: asyncio.TimerHandle | None = None


def merge_deltas(older: Delta | None, newer: Delta) -> Delta:
    """One delta that carries what two consecutive ones of the same attempt carry."""
    if older is None or newer.position != older.position + len(older.tokens):
        return newer
    return Delta(
        older.stream, older.attempt, older.position, older.tokens + newer.tokens, older.logprobs + newer.logprobs
    )


class FrontLink:
    """Listens for ingresses. Built anywhere; `start` and `close` on the I/O loop; `send` from the engine thread."""

    def __init__(
        self, identity: WorkerIdentity, ring: KeyRing, host: str, deliver: Deliver, engine_idle_ms: Callable[[], int]
    ) -> None:
        self._identity, self._ring, self._host = identity, ring, host
        self._deliver, self._engine_idle_ms = deliver, engine_idle_ms
        self._peers: dict[int, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> int:
        """Opens the listener on a free port and returns it."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self._own(self._beat())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Sends what is queued, then closes every connection and the listener."""
        for peer in list(self._peers.values()):
            self._flush(peer, force=True)
            peer.connection.close()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, batches: dict[int, list[UpMessage]]) -> None:
        """Queues messages per ingress; those of an ingress that is not connected are dropped (RESUME asks again)."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._enqueue, batches)

    def _own(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._own(self._serve(reader, writer))

    def _check(self, body: bytes) -> str | None:
        identity = IDENTITY_CODEC.decode(body)
        if not isinstance(identity, IngressIdentity):
            return "not_an_ingress"
        return None if identity.wanted in (0, self._identity.incarnation) else "wrong_incarnation"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        steps = server_steps(self._ring, FRONT_PLANE, IDENTITY_CODEC.encode(self._identity), self._check)
        try:
            connection = await establish(steps, reader, writer, FRONT_CODEC.max_frame_bytes)
        except TransferError as error:
            logger.warning("front link refused: %s", error)
            return
        identity = IDENTITY_CODEC.decode(connection.peer_body)
        assert isinstance(identity, IngressIdentity)
        peer = _Peer(identity.incarnation, connection, time.monotonic())
        older = self._peers.get(peer.incarnation)
        self._peers[peer.incarnation] = peer
        if older is not None:
            older.connection.abort()
        self._deliver(peer.incarnation, LinkUp())
        await self._read(peer)

    async def _read(self, peer: _Peer) -> None:
        try:
            while True:
                message = FRONT_CODEC.decode(await peer.connection.receive())
                peer.last_heard = time.monotonic()
                if not isinstance(message, Heartbeat):
                    self._deliver(peer.incarnation, message)  # type: ignore[arg-type]  # the codec yields front messages only
        except TransferError as error:
            logger.info("front link of ingress %016x ended: %s", peer.incarnation, error)
        finally:
            peer.connection.abort()
            if self._peers.get(peer.incarnation) is peer:
                del self._peers[peer.incarnation]
                self._deliver(peer.incarnation, LinkDown())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            beat = FRONT_CODEC.encode(Heartbeat(self._engine_idle_ms()))
            for peer in list(self._peers.values()):
                peer.connection.send(beat)
                if time.monotonic() - peer.last_heard > LOST_S:
                    peer.connection.abort()

    def _enqueue(self, batches: dict[int, list[UpMessage]]) -> None:
        for incarnation, messages in batches.items():
            peer = self._peers.get(incarnation)
            if peer is None:
                continue
            for message in messages:
                self._add(peer, message)
            self._flush(peer)

    def _add(self, peer: _Peer, message: UpMessage) -> None:
        if isinstance(message, Tokens):
            for delta in message.deltas:
                key = (delta.stream, delta.attempt)
                peer.deltas[key] = merge_deltas(peer.deltas.get(key), delta)
        elif isinstance(message, Load):
            peer.load = message
        elif isinstance(message, Accept | Busy):
            peer.replies.append(message)
        elif isinstance(message, Cache):
            self._add_news(peer, message)
        else:
            peer.others.append(message)

    def _add_news(self, peer: _Peer, message: Cache) -> None:
        if message.is_whole:
            peer.news = []
        peer.news.append(message)
        if len(peer.news) > MAX_NEWS:
            peer.news = []
            self._deliver(peer.incarnation, NewsLost())

    def _flush(self, peer: _Peer, *, force: bool = False) -> None:
        """ACCEPT leaves before tokens, tokens before END and FAILED: an END never arrives ahead of what it counts."""
        if peer.connection.unsent_bytes > MAX_UNSENT_BYTES and not force:
            if peer.retry is None:
                assert self._loop is not None
                peer.retry = self._loop.call_later(FLUSH_RETRY_S, self._retry, peer)
            return
        tokens: list[UpMessage] = [Tokens(tuple(peer.deltas.values()))] if peer.deltas else []
        messages = peer.replies + tokens + peer.others + ([peer.load] if peer.load is not None else []) + peer.news
        peer.replies, peer.deltas, peer.others, peer.load, peer.news = [], {}, [], None, []
        for message in messages:
            peer.connection.send(FRONT_CODEC.encode(message))

    def _retry(self, peer: _Peer) -> None:
        peer.retry = None
        if not peer.connection.is_closed:
            self._flush(peer)
