"""The listening end of sessions and lanes: who is let in, and which session a lane belongs to.

Knows handshakes and links. Knows no transfer. Everything runs on the event loop.
"""

import asyncio
import logging

from kv_transfer.errors import FrameInvalid, TransferError
from kv_transfer.link import Link, LinkHolder
from kv_transfer.messages import (
    IDENTITY_CODEC,
    LANE_PLANE,
    SESSION_CODEC,
    SESSION_PLANE,
    KVIdentity,
    LaneHello,
    SessionHello,
)
from kv_transfer.wire import Connection, KeyRing, establish, listen_steps

MAX_CONNECTIONS = 256
"""Sessions, and handshakes under way. Each handshake ends within wire.HANDSHAKE_TIMEOUT_S."""
_log = logging.getLogger(__name__)


class Listener:
    """Serves a link for every peer that proves itself, one at a time per incarnation."""

    def __init__(self, owner: LinkHolder, identity: KVIdentity, ring: KeyRing) -> None:
        self._owner, self._identity, self._ring = owner, identity, ring
        self._lanes: dict[bytes, asyncio.Future[tuple[Connection, bytes]]] = {}
        self._ending: set[Link] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens on `host`; returns the port."""
        self._server = await asyncio.start_server(self._accept, host, port)
        listening: int = self._server.sockets[0].getsockname()[1]
        return listening

    async def close(self) -> None:
        """Ends every link. Waits up to 2 s for lane threads."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.wait_lane_ended(2.0) for link in list(self._ending)))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._tasks.add(task)
        body = IDENTITY_CODEC.encode(self._identity)
        checks = {SESSION_PLANE: self._refusal_of_session, LANE_PLANE: self._refusal_of_lane}
        try:
            connection = await establish(
                listen_steps(self._ring, body, checks), reader, writer, SESSION_CODEC.max_frame_bytes
            )
            hello = IDENTITY_CODEC.decode(connection.peer_body)
            if isinstance(hello, SessionHello):
                await self._serve(connection, hello)
            elif isinstance(hello, LaneHello):
                arrives = self._lanes.pop(hello.session, None)
                if arrives is None or arrives.done():
                    connection.abort()
                else:
                    arrives.set_result((connection, hello.lane))
        except TransferError as error:
            _log.info("refused a connection: %s", error)
        except asyncio.CancelledError:
            pass  # only `close` cancels these tasks, and it waits for them
        finally:
            self._tasks.discard(task)

    def _refusal_of_session(self, body: bytes) -> str | None:
        hello = IDENTITY_CODEC.decode(body)
        if not isinstance(hello, SessionHello):
            raise FrameInvalid("a session starts with its own hello")
        if hello.wanted != self._identity.incarnation:
            return "wrong_incarnation"
        return self._identity.refusal_of(hello.identity)

    def _refusal_of_lane(self, body: bytes) -> str | None:
        hello = IDENTITY_CODEC.decode(body)
        if not isinstance(hello, LaneHello):
            raise FrameInvalid("a lane starts with its own hello")
        link = self._owner.find_link(hello.incarnation)
        if link is None or link.session != hello.session or hello.session not in self._lanes:
            return "no_session"
        return None if (hello.source_rank, hello.target_rank) == (0, 0) else "no_such_rank"

    async def _serve(self, connection: Connection, hello: SessionHello) -> None:
        incarnation = hello.identity.incarnation
        former = self._owner.find_link(incarnation)
        if former is not None:
            former.end("superseded")
            await former.closed.wait()
        arrives: asyncio.Future[tuple[Connection, bytes]] = asyncio.get_running_loop().create_future()
        self._lanes[hello.session] = arrives

        async def lane_arrives() -> tuple[Connection, bytes]:
            return await arrives

        choice = self._identity.choose_transport(hello.identity)
        assert choice is not None, "the handshake refuses who has no transport in common"
        link = Link(self._owner, hello.identity, choice, hello.session, connection, lane_arrives)
        self._owner.add_link(link)
        try:
            reason = await link.run()
            _log.info("link to decode worker %x over %s ended: %s", incarnation, choice.transport, reason)
        finally:
            self._lanes.pop(hello.session, None)
            self._owner.forget_link(link)
            self._ending = {former for former in (*self._ending, link) if not former.has_lane_ended}
