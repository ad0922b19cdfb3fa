"""The receiving end: lives in a decode leader, dials prefill leaders ahead of any request, writes units into granted
blocks.

Threads: `expect` and `revoke` come from the engine thread; sessions live on the event loop; units are written on lane
threads, each under the write window of its grant (`grants.py`). One lock guards all grants; frames are queued under it,
so they leave in the order of the state changes. Events are emitted after it is released. Lock order: this lock, then a
lane's.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer.errors import FrameInvalid, HandshakeFailed, OutOfOrder, PeerLost, TransferError
from kv_transfer.events import (
    Arrived,
    ArrivedUnit,
    BlocksProven,
    KVSource,
    ReceiverEvent,
    ReceiveTrace,
    SourceDown,
    SourceUp,
    TransferFailed,
)
from kv_transfer.grants import GrantAction, GrantedTransfer, GrantEvent
from kv_transfer.lane import WARM_UP_BYTES, BlobExchange, Lane, LaneWork, is_warm_up
from kv_transfer.link import Link
from kv_transfer.messages import (
    IDENTITY_CODEC,
    LANE_CODEC,
    LANE_PLANE,
    SESSION_CODEC,
    SESSION_PLANE,
    Abort,
    Adopted,
    Begin,
    Drained,
    Fin,
    Grant,
    KVIdentity,
    LaneHello,
    SessionHello,
    SessionMessage,
    TransferKey,
    Unit,
    pack_tables,
)
from kv_transfer.sender import now_us
from kv_transfer.staging import StagingBuffers, Tables, as_unit, digest_of, scatter_unit, view_cache
from kv_transfer.transports.base import DataPair, Ticket, Transport
from kv_transfer.wire import Connection, KeyRing, client_steps, dial

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_NOTICES = 16
"""Unit notices waiting for a receive; the sender's window of four keeps it below."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Receiving:
    """A grant with what the pure part must not know."""

    grant: GrantedTransfer
    link: Link
    trace: list[ArrivedUnit] = field(default_factory=list)
    abort_reason: str = "revoked"


class KVReceiver:
    """`data` is the cache `[layers_per_group, num_blocks, 2, num_kv_heads, block_tokens, head_dim]` of
    `identity.layout`.

    `emit` may be called from any thread and must not block. Arrived or TransferFailed comes at most once per expected
    transfer, and not after `revoke` has returned unless it was on its way.
    """

    def __init__(
        self, *, identity: KVIdentity, ring: KeyRing, data: Tensor, emit: Callable[[ReceiverEvent], None],
        transport: Transport,
    ) -> None:  # fmt: skip
        self._identity, self._ring = identity, ring
        self._cache = view_cache(data, identity.layout.keys, identity.layout.places)
        self._emit, self._transport = emit, transport
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted: dict[int, KVSource] = {}
        self._keepers: dict[int, asyncio.Task[None]] = {}
        self._links: dict[int, Link] = {}
        self._ending: set[Link] = set()
        self._receivings: dict[TransferKey, _Receiving] = {}
        self._last_generation = 0

    # --- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ready to dial; call it on the event loop that will carry the sessions."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Ends every link; expected transfers fail. Waits up to 2 s for lane threads. Event loop."""
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

    def open_sources(self) -> frozenset[int]:
        """Incarnations with a ready session and a warmed lane, heard within 3 s. Any thread."""
        with self._lock:
            return frozenset(incarnation for incarnation, link in self._links.items() if link.is_open)

    # --- transfers (engine thread) ----------------------------------------------------------------------------------

    def expect(self, key: tuple[bytes, int], source: int, tables: Tables, num_tokens: int, skip_tokens: int) -> None:
        """A BEGIN of this key by `source` is answered by GRANT at once. `tables` are the block tables from token 0."""
        key = TransferKey(*key)
        layout = self._identity.layout
        num_pages = layout.num_blocks(num_tokens)
        fits = len(tables) == len(layout.layer_groups) and all(len(table) >= num_pages for table in tables)
        assert fits, f"{key!r}: too few blocks for {num_tokens} tokens"
        with self._lock:
            is_known = key in self._receivings  # not drained yet, or asked for twice: never two grants of one key
            link = None if is_known else self._links.get(source)
            if link is not None:
                grant = GrantedTransfer(
                    key, source, tuple(map(tuple, tables)), num_tokens, skip_tokens, layout.num_layers
                )
                self._receivings[key] = _Receiving(grant, link)
        if link is None:
            self._emit(TransferFailed(key, "peer_lost"))

    def revoke(self, key: tuple[bytes, int], reason: str) -> tuple[int, ...]:
        """Takes the blocks back without waiting; returns those being written at this moment (quarantine).

        All others may be reused at once; BlocksProven follows for the returned ones. An unknown or adopted key gives
        ().
        """
        with self._lock:
            receiving = self._receivings.get(TransferKey(*key))
            if receiving is None or receiving.grant.is_revoked:
                return ()
            receiving.abort_reason = reason
            events = self._perform(receiving, receiving.grant.on(GrantEvent.REVOKE))
            assert not events, "a revoke reports nothing"
            return receiving.grant.open_blocks

    # --- the state machine's hands (under the lock) -----------------------------------------------------------------

    def _perform(self, receiving: _Receiving, actions: Sequence[GrantAction]) -> list[ReceiverEvent]:
        grant, link, events = receiving.grant, receiving.link, list[ReceiverEvent]()
        for action in actions:
            match action:
                case GrantAction.SEND_GRANT:
                    self._last_generation += 1
                    grant.generation = self._last_generation
                    num_pages = self._identity.layout.num_blocks(grant.num_tokens)
                    link.send(Grant(*grant.key, grant.generation, pack_tables(grant.tables, num_pages)))
                case GrantAction.SEND_ADOPTED:
                    link.send(Adopted(*grant.key))
                case GrantAction.SEND_ABORT:
                    link.send(Abort(*grant.key, grant.failure or receiving.abort_reason))
                case GrantAction.EMIT_ARRIVED:
                    assert grant.fin is not None
                    events.append(Arrived(grant.key, grant.fin.meta, ReceiveTrace(tuple(receiving.trace))))
                case GrantAction.EMIT_FAILED:
                    events.append(TransferFailed(grant.key, grant.failure or "peer_lost"))
        if grant.is_forgotten and self._receivings.get(grant.key) is receiving:
            del self._receivings[grant.key]
        return events

    def _emit_all(self, events: Sequence[ReceiverEvent]) -> None:
        for event in events:
            self._emit(event)

    # --- sources and links (event loop) -----------------------------------------------------------------------------

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

        link = Link(self, identity, session, connection, lane_arrives)
        with self._lock:
            self._links[source.incarnation] = link
        try:
            reason = await link.run()
            _log.info("link to prefill worker %x ended: %s", source.incarnation, reason)
        finally:
            self._forget(link)
        return link.was_open

    def _check_peer(self, peer_body: bytes, wanted: int) -> None:
        identity = IDENTITY_CODEC.decode(peer_body)
        if not isinstance(identity, KVIdentity) or identity.incarnation != wanted:
            raise HandshakeFailed("another process answers at this address")
        refusal = self._identity.refusal_of(identity)
        if refusal is not None:
            raise HandshakeFailed(f"the peer's KV cache does not fit: {refusal}")

    def _forget(self, link: Link) -> None:
        events: list[ReceiverEvent] = []
        self._ending = {former for former in (*self._ending, link) if not former.has_lane_ended}
        with self._lock:
            if self._links.get(link.peer.incarnation) is link:
                del self._links[link.peer.incarnation]
            for receiving in [r for r in self._receivings.values() if r.link is link]:
                events += self._perform(receiving, receiving.grant.on(GrantEvent.LOST))
        self._emit_all(events)

    def on_open(self, link: Link, is_open: bool) -> None:
        self._emit(SourceUp(link.peer.incarnation) if is_open else SourceDown(link.peer.incarnation))

    def on_message(self, link: Link, message: SessionMessage) -> None:
        with self._lock:
            events = self._take(link, message)
        self._emit_all(events)

    def _take(self, link: Link, message: SessionMessage) -> list[ReceiverEvent]:
        if not isinstance(message, Begin | Fin | Abort | Drained):
            raise OutOfOrder(f"{type(message).__name__} goes from decode to prefill only")
        key = TransferKey(message.stream, message.attempt)
        receiving = self._receivings.get(key)
        if receiving is None or receiving.link is not link:
            if isinstance(message, Begin):
                link.send(Abort(*key, "not_expected"))
            return []  # over here already; the answer crossed ours
        grant = receiving.grant
        match message:
            case Begin():
                return self._perform(receiving, grant.on(GrantEvent.BEGIN))
            case Fin():
                return self._perform(receiving, grant.on_fin(message))
            case Drained():
                return self._perform(receiving, grant.on(GrantEvent.DRAINED))
            case Abort():
                grant.failure = grant.failure or message.reason
                return self._perform(receiving, grant.on(GrantEvent.PEER_ABORT))

    # --- lanes ------------------------------------------------------------------------------------------------------

    def on_unit(self, link: Link, unit: Unit) -> None:
        wanted = self._identity.layout.unit_bytes(unit.num_tokens, unit.num_layers)
        if unit.num_bytes != wanted:
            raise FrameInvalid(f"a unit of {unit.num_bytes} bytes is announced, its shape needs {wanted}")
        assert link.lane is not None
        if link.lane.num_waiting >= MAX_NOTICES:
            raise FrameInvalid(f"over {MAX_NOTICES} units are announced at once")
        link.lane.offer(unit)

    def make_lane(self, link: Link, lane_id: bytes, exchange: BlobExchange) -> Lane[Unit]:
        buffers = StagingBuffers()

        def open_pair() -> DataPair:
            pair = self._transport.open(0, lane_id, exchange)
            ticket = pair.receive(torch.empty(WARM_UP_BYTES, dtype=torch.uint8))
            ticket.wait()
            if not is_warm_up(lane_id, ticket.buffer):
                self._transport.renew()
                raise PeerLost("a stranger is on the lane's data pair")
            return pair

        def post(pair: DataPair, unit: Unit) -> Ticket:
            return pair.receive(buffers.take(unit.num_bytes))

        def complete(unit: Unit, ticket: Ticket) -> None:
            ticket.wait()
            self._write(link, unit, ticket.buffer)
            buffers.give(ticket.buffer)

        return Lane(lane_id.hex()[:8], LaneWork(open_pair, post, complete, link.lane_is_warm, link.lane_has_ended))

    def _write(self, link: Link, unit: Unit, buffer: Tensor) -> None:
        """Writes a received unit into its blocks under the write window, or drops it when nobody grants it any more."""
        arrived_us = now_us()
        layout = self._identity.layout
        events: list[ReceiverEvent] = []
        with self._lock:
            receiving = self._receivings.get(TransferKey(unit.stream, unit.attempt))
            is_writable = False
            if receiving is not None and receiving.link is link and receiving.grant.generation == unit.generation:
                misfit = receiving.grant.misfit_of(unit)
                if misfit is not None:
                    events = self._perform(receiving, receiving.grant.fail(misfit))
                else:
                    blocks = self._cache.touched_blocks(
                        receiving.grant.tables, unit.first_token, unit.num_tokens, unit.first_layer, unit.num_layers
                    )
                    is_writable = receiving.grant.open_window(unit, blocks)
        if receiving is not None and is_writable:
            scatter_unit(
                self._cache, receiving.grant.tables, as_unit(buffer, layout, unit.num_tokens, unit.num_layers),
                unit.first_token, unit.first_layer,
            )  # fmt: skip
            digest = digest_of(buffer)
            with self._lock:
                receiving.trace.append(ArrivedUnit(unit.num_bytes, arrived_us))
                actions, proven = receiving.grant.close_window(unit, blocks, digest)
                events = self._perform(receiving, actions)
            if proven:
                events.append(BlocksProven(proven))
        self._emit_all(events)
