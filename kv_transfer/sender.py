"""The sending end: lives in a prefill leader, answers sessions and lanes, pushes units.

Threads: `begin`, `push`, `finish`, `abort` come from the engine thread; sessions live on the event loop; units complete
on lane threads. One lock guards all transfers; frames are queued under it, so they leave in the order of the state
changes. Events are emitted after it is released, from whichever thread caused them. Lock order: this lock, then a
lane's.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer.choice import has_digests
from kv_transfer.copies import Part
from kv_transfer.direct import DirectWriter
from kv_transfer.errors import OutOfOrder, TransferError
from kv_transfer.events import Adopted, Granted, PeerDown, PeerUp, SenderEvent, SendTrace, SentUnit, TransferFailed
from kv_transfer.lane import BlobExchange, Lane, LaneWork, make_warm_up
from kv_transfer.layout import MAX_UNIT_BYTES
from kv_transfer.link import Link
from kv_transfer.listener import Listener
from kv_transfer.messages import (
    MAX_META_BYTES,
    Abort,
    Begin,
    Drained,
    Fin,
    Grant,
    KVIdentity,
    SessionMessage,
    TransferKey,
    Unit,
    pack_u32,
    unpack_tables,
)
from kv_transfer.messages import Adopted as AdoptedMessage
from kv_transfer.session import SendAction, SendEvent, SendTransfer
from kv_transfer.staging import TORCH_DTYPES, Tables, as_bytes, digest_of, gather_unit, view_cache
from kv_transfer.transports.base import AnyPair, DataPair, Ticket, Transport, WriterPair
from kv_transfer.wire import KeyRing


def now_us() -> int:
    return time.monotonic_ns() // 1000


@dataclass(slots=True, eq=False)
class _Sending:
    """A transfer with what the pure part must not know."""

    transfer: SendTransfer
    link: Link
    dtype: torch.dtype
    target_tables: Tables = ()
    """The grant's, for a one-sided lane."""
    queued: "list[_QueuedUnit]" = field(default_factory=list)
    trace: list[SentUnit] = field(default_factory=list)
    failure: str = "peer_lost"


@dataclass(slots=True, eq=False)
class _QueuedUnit:
    sending: _Sending
    index: int
    part: Part
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
        transports: Mapping[str, Transport],
    ) -> None:  # fmt: skip
        """`transports` are those of the identity, by name."""
        self._identity, self._host = identity, host
        self._cache = view_cache(data, identity.layout.keys, identity.layout.places)
        self._data, self._emit, self._transports = data, emit, transports
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._sendings: dict[TransferKey, _Sending] = {}
        self._writers: dict[Link, DirectWriter] = {}
        self._listener = Listener(self, identity, ring)

    # --- lifetime (event loop) --------------------------------------------------------------------------------------

    async def start(self, port: int = 0) -> int:
        """Listens for sessions and lanes on one port of `host`; returns it."""
        return await self._listener.start(self._host, port)

    async def close(self) -> None:
        """Ends every link; open transfers fail. Waits up to 2 s for lane threads."""
        await self._listener.close()

    def open_peers(self) -> tuple[int, ...]:
        """Incarnations with a ready session and a warmed lane, heard within 3 s. Any thread."""
        with self._lock:
            return tuple(sorted(incarnation for incarnation, link in self._links.items() if link.is_open))

    def describe_links(self) -> tuple[str, ...]:
        """Over what the open links move KV and why, each way once. Any thread."""
        with self._lock:
            choices = {link.choice for link in self._links.values() if link.is_open}
        return tuple(sorted(f"{choice.transport}: {choice.reason}" for choice in choices))

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
        """Copies this part of the cache: into a unit that is sent once granted, or, granted and on a one-sided lane,
        straight into the peer's blocks. A transfer that is over swallows it.

        `tables` are the block tables as they are now. Units of a layer come in token order without gap. Raises
        ValueError for a part outside the transfer.
        """
        part = Part(first_token, num_tokens, first_layer, num_layers)
        with self._lock:
            sending = self._sendings.get(TransferKey(*key))
            if sending is None or not sending.transfer.takes_units:
                return
            writer = self._writer_for(sending)
            self._check_size(sending, part)
            index = sending.transfer.add_unit(*part)
            sending.transfer.in_lane += writer is not None
        pushed_us = now_us()
        if writer is not None:
            try:
                is_written = writer.write_part(sending.transfer.generation, tables, sending.target_tables, part)
            except TransferError as error:
                sending.link.end(f"write: {error}")
                return  # the transfer ends with its link
            self._count_written(sending, index, part, pushed_us, is_written)
            return
        unit = gather_unit(self._cache, tables, *part, dtype=sending.dtype)
        buffer = as_bytes(unit.cpu())  # of a cache on a GPU: what travels lies in host memory
        queued = _QueuedUnit(sending, index, part, buffer, pushed_us)
        with self._lock:
            if sending.transfer.is_granted:
                self._release(sending, [queued])
            elif sending.transfer.takes_units:
                sending.queued.append(queued)

    def _writer_for(self, sending: _Sending) -> DirectWriter | None:
        """Who may write the next unit at once, if it is granted, without digests, and nothing is before it."""
        link, transfer = sending.link, sending.transfer
        if not transfer.is_granted or transfer.in_lane > 0 or self._has_digests(link):
            return None
        return self._writers.get(link)

    def _check_size(self, sending: _Sending, part: Part) -> None:
        num_bytes = sending.link.peer.layout.unit_bytes(part.num_tokens, part.num_layers)
        if num_bytes > MAX_UNIT_BYTES:
            raise ValueError(f"a unit of {num_bytes} bytes is over the limit of {MAX_UNIT_BYTES}: push fewer layers")

    def _has_digests(self, link: Link) -> bool:
        return has_digests(self._identity.verify, link.choice.transport)

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

    # --- links (event loop) -----------------------------------------------------------------------------------------

    def find_link(self, incarnation: int) -> Link | None:
        return self._links.get(incarnation)

    def add_link(self, link: Link) -> None:
        with self._lock:
            self._links[link.peer.incarnation] = link

    def forget_link(self, link: Link) -> None:
        events: list[SenderEvent] = []
        with self._lock:
            self._writers.pop(link, None)
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
            sending.target_tables = unpack_tables(message.tables, len(theirs.layer_groups), num_pages)
            sending.transfer.generation = message.generation
            return self._step(sending, SendEvent.GRANT)
        if isinstance(message, Abort):
            sending.failure = message.reason
            return self._step(sending, SendEvent.PEER_ABORT)
        return self._step(sending, SendEvent.ADOPTED)

    # --- lanes ------------------------------------------------------------------------------------------------------

    def make_lane(self, link: Link, lane_id: bytes, exchange: BlobExchange) -> Lane[_QueuedUnit]:
        def open_pair() -> AnyPair:
            pair = self._transports[link.choice.transport].open(1, lane_id, exchange)
            if isinstance(pair, WriterPair):
                writer = DirectWriter(self._data, self._identity.layout, pair, link.peer.layout)
                with self._lock:
                    self._writers[link] = writer
            else:
                assert isinstance(pair, DataPair), "the sender's end"
                pair.send(make_warm_up(lane_id)).wait()
            return pair

        def post(pair: AnyPair, unit: _QueuedUnit) -> Ticket | None:
            if not isinstance(pair, DataPair):
                return None
            self._announce(unit.sending, unit.index, unit.part)
            return pair.send(unit.buffer)

        work = LaneWork(open_pair, post, self._complete, link.lane_is_warm, link.lane_has_ended)
        return Lane(lane_id.hex()[:8], work)

    def _announce(self, sending: _Sending, index: int, part: Part) -> None:
        num_bytes = sending.link.peer.layout.unit_bytes(part.num_tokens, part.num_layers)
        sending.link.send_lane(sending.transfer.notice(index, part, num_bytes))

    def _complete(self, unit: _QueuedUnit, ticket: Ticket | None) -> None:
        sending = unit.sending
        digest = digest_of(unit.buffer) if self._has_digests(sending.link) else None
        if ticket is not None:
            ticket.wait()
            self._count_sent(sending, unit.part, unit.pushed_us, digest)
            return
        with self._lock:
            writer, tables = self._writers.get(sending.link), sending.target_tables
        if writer is not None:
            is_written = writer.write_unit(sending.transfer.generation, unit.buffer, tables, unit.part)
            self._count_written(sending, unit.index, unit.part, unit.pushed_us, is_written, digest)

    def _count_written(
        self, sending: _Sending, index: int, part: Part, pushed_us: int, is_written: bool, digest: int | None = None
    ) -> None:
        """A unit that the fence turned away is not announced: decode has revoked, and its ABORT is on the way."""
        if is_written:
            self._announce(sending, index, part)
        self._count_sent(sending, part, pushed_us, digest)

    def _count_sent(self, sending: _Sending, part: Part, pushed_us: int, digest: int | None) -> None:
        num_bytes = sending.link.peer.layout.unit_bytes(part.num_tokens, part.num_layers)
        with self._lock:
            sending.trace.append(SentUnit(*part, num_bytes, pushed_us, now_us()))
            events = self._perform(sending, sending.transfer.unit_sent(digest))
        self._emit_all(events)
