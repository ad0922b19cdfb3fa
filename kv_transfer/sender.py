"""The sending end: lives in a prefill leader, answers sessions and lanes, pushes units.

Threads: `begin`, `push`, `finish`, `abort` come from the engine thread; sessions live on the event loop; units complete
on lane threads. One lock guards all transfers; frames are queued under it, so they leave in the order of the state
changes. Events are emitted after it is released, from whichever thread caused them. Lock order: this lock, then a
lane's.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kv_transfer.errors import FrameInvalid, OutOfOrder, TransferError
from kv_transfer.events import Adopted, Granted, PeerDown, PeerUp, SenderEvent, SendTrace, SentUnit, TransferFailed
from kv_transfer.lane import BlobExchange, Lane, LaneWork, make_warm_up
from kv_transfer.layout import MAX_UNIT_BYTES
from kv_transfer.link import Link
from kv_transfer.messages import (
    IDENTITY_CODEC,
    LANE_PLANE,
    MAX_META_BYTES,
    SESSION_CODEC,
    SESSION_PLANE,
    Abort,
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
    pack_u32,
    unpack_tables,
)
from kv_transfer.messages import Adopted as AdoptedMessage
from kv_transfer.session import SendAction, SendEvent, SendTransfer
from kv_transfer.staging import TORCH_DTYPES, Tables, as_bytes, digest_of, gather_unit, view_cache
from kv_transfer.transports.base import DataPair, Ticket, Transport
from kv_transfer.wire import Connection, KeyRing, establish, listen_steps

MAX_CONNECTIONS = 256
"""Sessions, and handshakes under way. Each handshake ends within wire.HANDSHAKE_TIMEOUT_S."""
_log = logging.getLogger(__name__)


def now_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(slots=True, eq=False)
class _Sending:
    """A transfer with what the pure part must not know."""

    transfer: SendTransfer
    link: Link
    dtype: torch.dtype
    queued: "list[_QueuedUnit]" = field(default_factory=list)
    trace: list[SentUnit] = field(default_factory=list)
    failure: str = "peer_lost"


@dataclass(slots=True, eq=False)
class _QueuedUnit:
    sending: _Sending
    index: int
    part: tuple[int, int, int, int]
    """first_token, num_tokens, first_layer, num_layers"""
    buffer: Tensor
    pushed_us: int


class KVSender:
    """`data` is the cache `[layers_per_group, num_blocks, 2, num_kv_heads, block_tokens, head_dim]` of
    `identity.layout`.

    `emit` may be called from any thread and must not block. Adopted or TransferFailed comes exactly once per begun
    transfer, unless we abort it first. `push` copies at once: the sender never refers to a block after it has returned.
    """

    def __init__(
        self, *, identity: KVIdentity, ring: KeyRing, data: Tensor, host: str, emit: Callable[[SenderEvent], None],
        transport: Transport, verify: Literal["off", "full"] = "full",
    ) -> None:  # fmt: skip
        self._identity, self._ring, self._host = identity, ring, host
        self._cache = view_cache(data, identity.layout.keys, identity.layout.places)
        self._emit, self._transport, self._verify = emit, transport, verify
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._ending: set[Link] = set()
        self._lanes: dict[bytes, asyncio.Future[tuple[Connection, bytes]]] = {}
        self._sendings: dict[TransferKey, _Sending] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- lifetime (event loop) --------------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> int:
        """Listens for sessions and lanes on one port of `host`; returns it."""
        self._server = await asyncio.start_server(self._accept, self._host, port)
        listening: int = self._server.sockets[0].getsockname()[1]
        return listening

    async def close(self) -> None:
        """Ends every link; open transfers fail. Waits up to 2 s for lane threads."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.wait_lane_ended(2.0) for link in list(self._ending)))

    def open_peers(self) -> tuple[int, ...]:
        """Incarnations with a ready session and a warmed lane, heard within 3 s. Any thread."""
        with self._lock:
            return tuple(sorted(incarnation for incarnation, link in self._links.items() if link.is_open))

    # --- transfers (engine thread) ----------------------------------------------------------------------------------

    def begin(self, key: tuple[bytes, int], peer: int, num_tokens: int, skip_tokens: int) -> None:
        """Sends BEGIN; tokens from `skip_tokens` on will be pushed."""
        key = TransferKey(*key)
        with self._lock:
            assert key not in self._sendings, f"{key!r} has begun already"
            link = self._links.get(peer)
            has_lane = link is not None and link.lane is not None
            if link is not None and has_lane:
                transfer = SendTransfer(key, skip_tokens, num_tokens, self._identity.layout.num_layers)
                self._sendings[key] = _Sending(transfer, link, TORCH_DTYPES[link.peer.layout.dtype])
                link.send(Begin(*key))
        if not has_lane:
            self._emit(TransferFailed(key, "peer_lost"))

    def push(
        self, key: tuple[bytes, int], tables: Tables, first_token: int, num_tokens: int, first_layer: int,
        num_layers: int,
    ) -> None:  # fmt: skip
        """Copies this part of the cache into a unit; it is sent once granted. A transfer that is over swallows it.

        `tables` are the block tables as they are now. Units of a layer come in token order without gap. Raises
        ValueError for a part outside the transfer.
        """
        part = (first_token, num_tokens, first_layer, num_layers)
        with self._lock:
            sending = self._sendings.get(TransferKey(*key))
            if sending is None or not sending.transfer.takes_units:
                return
            index = sending.transfer.add_unit(*part)
        unit = gather_unit(self._cache, tables, *part, dtype=sending.dtype)
        buffer = as_bytes(unit.cpu())  # of a cache on a GPU: what travels lies in host memory
        if buffer.numel() > MAX_UNIT_BYTES:
            raise ValueError(
                f"a unit of {buffer.numel()} bytes is over the limit of {MAX_UNIT_BYTES}: push fewer layers"
            )
        queued = _QueuedUnit(sending, index, part, buffer, now_us())
        with self._lock:
            if sending.transfer.is_granted:
                self._release(sending, [queued])
            elif sending.transfer.takes_units:
                sending.queued.append(queued)

    def finish(self, key: tuple[bytes, int], meta: bytes) -> None:
        """FIN with `meta` goes out once every unit is sent. A transfer that is over swallows it. Raises ValueError."""
        if len(meta) > MAX_META_BYTES:
            raise ValueError(f"meta of {len(meta)} bytes is over the limit of {MAX_META_BYTES}")
        events: list[SenderEvent] = []
        with self._lock:
            sending = self._sendings.get(TransferKey(*key))
            if sending is not None:
                transfer = sending.transfer
                if transfer.takes_units and any(token != transfer.num_tokens for token in transfer.next_token):
                    raise ValueError(
                        f"{transfer.key!r} is finished before every layer was pushed to token {transfer.num_tokens}"
                    )
                transfer.meta = meta
                events = self._step(sending, SendEvent.FINISH)
        self._emit_all(events)

    def abort(self, key: tuple[bytes, int], reason: str) -> None:
        """No new unit is announced; ABORT and DRAINED go out. Idempotent; an unknown key is fine. Emits nothing."""
        with self._lock:
            sending = self._sendings.get(TransferKey(*key))
            if sending is not None:
                sending.failure = reason
                events = self._step(sending, SendEvent.ABORT)
                assert not events, "an abort of our own reports nothing"

    # --- the state machine's hands (under the lock) -----------------------------------------------------------------

    def _step(self, sending: _Sending, event: SendEvent) -> list[SenderEvent]:
        events = self._perform(sending, sending.transfer.on(event))
        events += self._perform(sending, sending.transfer.settle())
        return events

    def _perform(self, sending: _Sending, actions: Sequence[SendAction]) -> list[SenderEvent]:
        transfer, link, events = sending.transfer, sending.link, list[SenderEvent]()
        key = transfer.key
        for action in actions:
            match action:
                case SendAction.RELEASE_UNITS:
                    self._release(sending, sending.queued)
                    sending.queued = []
                case SendAction.DROP_UNITS:
                    sending.queued = []
                    if link.lane is not None:
                        transfer.in_lane -= link.lane.drop(lambda unit: unit.sending is sending)
                case SendAction.SEND_FIN:
                    digests = pack_u32(transfer.digests)
                    link.send(Fin(*key, transfer.generation, (transfer.num_sent,), digests, transfer.meta))
                case SendAction.SEND_ABORT:
                    link.send(Abort(*key, sending.failure))
                case SendAction.SEND_DRAINED:
                    link.send(Drained(*key, transfer.generation, (transfer.num_sent,)))
                case SendAction.EMIT_GRANTED:
                    events.append(Granted(key))
                case SendAction.EMIT_ADOPTED:
                    events.append(Adopted(key, SendTrace(tuple(sending.trace))))
                case SendAction.EMIT_FAILED:
                    events.append(TransferFailed(key, sending.failure))
        if transfer.is_ended:
            self._sendings.pop(key, None)
        return events

    def _release(self, sending: _Sending, units: Sequence[_QueuedUnit]) -> None:
        lane = sending.link.lane
        assert lane is not None, "a transfer begins only on a link with a lane"
        sending.transfer.in_lane += len(units)
        for unit in units:
            lane.offer(unit)

    def _emit_all(self, events: Sequence[SenderEvent]) -> None:
        for event in events:
            self._emit(event)

    # --- sessions (event loop) --------------------------------------------------------------------------------------

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
        link = self._links.get(hello.incarnation)
        if link is None or link.session != hello.session or hello.session not in self._lanes:
            return "no_session"
        return None if (hello.source_rank, hello.target_rank) == (0, 0) else "no_such_rank"

    async def _serve(self, connection: Connection, hello: SessionHello) -> None:
        incarnation = hello.identity.incarnation
        former = self._links.get(incarnation)
        if former is not None:
            former.end("superseded")
            await former.closed.wait()
        arrives: asyncio.Future[tuple[Connection, bytes]] = asyncio.get_running_loop().create_future()
        self._lanes[hello.session] = arrives

        async def lane_arrives() -> tuple[Connection, bytes]:
            return await arrives

        link = Link(self, hello.identity, hello.session, connection, lane_arrives)
        with self._lock:
            self._links[incarnation] = link
        try:
            reason = await link.run()
            _log.info("link to decode worker %x ended: %s", incarnation, reason)
        finally:
            self._lanes.pop(hello.session, None)
            self._forget(link)

    def _forget(self, link: Link) -> None:
        events: list[SenderEvent] = []
        self._ending = {former for former in (*self._ending, link) if not former.has_lane_ended}
        with self._lock:
            if self._links.get(link.peer.incarnation) is link:
                del self._links[link.peer.incarnation]
            for sending in [s for s in self._sendings.values() if s.link is link]:
                events += self._step(sending, SendEvent.LOST)
        self._emit_all(events)

    def on_open(self, link: Link, is_open: bool) -> None:
        self._emit(PeerUp(link.peer.incarnation) if is_open else PeerDown(link.peer.incarnation))

    def on_unit(self, link: Link, unit: Unit) -> None:
        raise OutOfOrder("a lane carries units from prefill to decode only")

    def on_message(self, link: Link, message: SessionMessage) -> None:
        with self._lock:
            events = self._take(link, message)
        self._emit_all(events)

    def _take(self, link: Link, message: SessionMessage) -> list[SenderEvent]:
        if not isinstance(message, Grant | AdoptedMessage | Abort):
            raise OutOfOrder(f"{type(message).__name__} goes from prefill to decode only")
        sending = self._sendings.get(TransferKey(message.stream, message.attempt))
        if sending is None or sending.link is not link:
            return []  # over here already; the answer crossed ours
        if isinstance(message, Grant):
            theirs = link.peer.layout
            num_pages = theirs.num_blocks(sending.transfer.num_tokens)
            unpack_tables(message.tables, len(theirs.layer_groups), num_pages)  # or the link ends
            sending.transfer.generation = message.generation
            return self._step(sending, SendEvent.GRANT)
        if isinstance(message, Abort):
            sending.failure = message.reason
            return self._step(sending, SendEvent.PEER_ABORT)
        return self._step(sending, SendEvent.ADOPTED)

    # --- lanes ------------------------------------------------------------------------------------------------------

    def make_lane(self, link: Link, lane_id: bytes, exchange: BlobExchange) -> Lane[_QueuedUnit]:
        def open_pair() -> DataPair:
            pair = self._transport.open(1, lane_id, exchange)
            pair.send(make_warm_up(lane_id)).wait()
            return pair

        def post(pair: DataPair, unit: _QueuedUnit) -> Ticket:
            link.send_lane(unit.sending.transfer.notice(unit.index, unit.part, unit.buffer.numel()))
            return pair.send(unit.buffer)

        work = LaneWork(open_pair, post, self._complete, link.lane_is_warm, link.lane_has_ended)
        return Lane(lane_id.hex()[:8], work)

    def _complete(self, unit: _QueuedUnit, ticket: Ticket) -> None:
        digest = digest_of(unit.buffer) if self._verify == "full" else None
        ticket.wait()
        sending = unit.sending
        with self._lock:
            sending.trace.append(SentUnit(*unit.part, unit.buffer.numel(), unit.pushed_us, now_us()))
            events = self._perform(sending, sending.transfer.unit_sent(digest))
        self._emit_all(events)
