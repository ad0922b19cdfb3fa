"""The dialling end of sessions and lanes: reaches every source before any request, again and again while it is listed.

Knows handshakes, links and backoff. Knows no transfer. Everything runs on the event loop but `set_sources`.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence

from kv_transfer.errors import HandshakeFailed, TransferError
from kv_transfer.events import KVSource
from kv_transfer.link import Link, LinkHolder
from kv_transfer.messages import (
    IDENTITY_CODEC,
    LANE_CODEC,
    LANE_PLANE,
    SESSION_CODEC,
    SESSION_PLANE,
    KVIdentity,
    LaneHello,
    SessionHello,
)
from kv_transfer.wire import Connection, KeyRing, client_steps, dial

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
_log = logging.getLogger(__name__)


class Dialler:
    """Keeps a link to every source."""

    def __init__(self, owner: LinkHolder, identity: KVIdentity, ring: KeyRing) -> None:
        self._owner, self._identity, self._ring = owner, identity, ring
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted: dict[int, KVSource] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._ending: set[Link] = set()

    def start(self) -> None:
        """Call it on the event loop that will carry the sessions."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Ends every link. Waits up to 2 s for lane threads."""
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(link.wait_lane_ended(2.0) for link in list(self._ending)))

    def set_sources(self, sources: Sequence[KVSource]) -> None:
        """New sources are dialled, and redialled while they stay listed; a link is never closed by leaving. Any
        thread."""
        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(self._apply_sources, {source.incarnation: source for source in sources})

    def _apply_sources(self, wanted: dict[int, KVSource]) -> None:
        self._wanted = wanted
        for incarnation in wanted:
            if incarnation not in self._keepers:
                task = asyncio.create_task(self._keep(incarnation), name=f"kv-source-{incarnation:x}")
                self._keepers[incarnation] = task

    async def _keep(self, incarnation: int) -> None:
        """Dials a source and serves its link, again and again while it is listed."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while (source := self._wanted.get(incarnation)) is not None:
                try:
                    was_open = await self._serve(source)
                    backoff_s = FIRST_BACKOFF_S if was_open else backoff_s
                except TransferError as error:
                    _log.info("cannot dial prefill worker %x: %s", incarnation, error)
                except Exception:  # noqa: BLE001  # the edge of a link: its transfers failed, it is dialled anew
                    _log.exception("link to prefill worker %x failed", incarnation)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            del self._keepers[incarnation]

    async def _serve(self, source: KVSource) -> bool:
        """Dials and serves one link until it ends; returns whether it ever was open. Raises `TransferError`."""
        session = secrets.token_bytes(8)
        body = IDENTITY_CODEC.encode(SessionHello(self._identity, source.incarnation, session))

        def check(peer_body: bytes) -> None:
            self._check_peer(peer_body, source.incarnation)

        steps = client_steps(self._ring, SESSION_PLANE, body, check)
        connection = await dial(source.host, source.port, steps, SESSION_CODEC.max_frame_bytes)
        identity = IDENTITY_CODEC.decode(connection.peer_body)
        assert isinstance(identity, KVIdentity)

        async def lane_arrives() -> tuple[Connection, bytes]:
            lane = secrets.token_bytes(8)
            _log.info("opening lane %s to prefill worker %x", lane.hex()[:8], source.incarnation)
            hello = IDENTITY_CODEC.encode(LaneHello(self._identity.incarnation, session, lane, 0, 0))
            steps = client_steps(self._ring, LANE_PLANE, hello, check)
            return await dial(source.host, source.port, steps, LANE_CODEC.max_frame_bytes), lane

        choice = self._identity.choose_transport(identity)
        assert choice is not None, "the handshake refuses who has no transport in common"
        link = Link(self._owner, identity, choice, session, connection, lane_arrives)
        self._owner.add_link(link)
        try:
            reason = await link.run()
            _log.info("link to prefill worker %x over %s ended: %s", source.incarnation, choice.transport, reason)
        finally:
            self._owner.forget_link(link)
            self._ending = {former for former in (*self._ending, link) if not former.has_lane_ended}
        return link.was_open

    def _check_peer(self, peer_body: bytes, wanted: int) -> None:
        identity = IDENTITY_CODEC.decode(peer_body)
        if not isinstance(identity, KVIdentity) or identity.incarnation != wanted:
            raise HandshakeFailed("another process answers at this address")
        refusal = self._identity.refusal_of(identity)
        if refusal is not None:
            raise HandshakeFailed(f"the peer's KV cache does not fit: {refusal}")
