"""The receiving end: lives in a decode leader, dials prefill leaders ahead of any request, writes units into granted
blocks.

Threads: `expect` and `revoke` come from the engine thread; sessions live on the event loop; units are written on lane
threads, each under the write window of its grant (`grants.py`). One lock guards all grants; frames are queued under it,
so they leave in the order of the state changes. Events are emitted after it is released. Lock order: this lock, then a
lane's.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer.choice import ONE_SIDED, has_digests
from kv_transfer.dialler import Dialler
from kv_transfer.errors import FrameInvalid, OutOfOrder, PeerLost
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
    Abort,
    Adopted,
    Begin,
    Drained,
    Fin,
    Grant,
    KVIdentity,
    SessionMessage,
    TransferKey,
    Unit,
    pack_tables,
)
from kv_transfer.quarantine import Quarantine
from kv_transfer.sender import now_us
from kv_transfer.staging import (
    StagingBuffers,
    Tables,
    as_bytes,
    as_unit,
    digest_of,
    gather_unit,
    scatter_unit,
    view_cache,
)
from kv_transfer.transports.base import AnyPair, DataPair, TargetPair, Ticket, Transport
from kv_transfer.wire import KeyRing

MAX_NOTICES = 16
"""Unit notices waiting for a receive; the sender's window of four keeps it below."""
MAX_WRITTEN_NOTICES = 1 << 14
"""Unit notices of a one-sided lane waiting for their check; the sender waits for none."""


@dataclass(slots=True, eq=False)
class _Receiving:
    """A grant with what the pure part must not know."""

    grant: GrantedTransfer
    link: Link
    target: TargetPair | None = None
    """Of a one-sided lane, once granted."""
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
        transports: Mapping[str, Transport],
    ) -> None:  # fmt: skip
        """`transports` are those of the identity, by name."""
        self._identity = identity
        self._cache = view_cache(data, identity.layout.keys, identity.layout.places)
        self._emit, self._transports = emit, transports
        self._quarantine = Quarantine(lambda blocks: emit(BlocksProven(blocks)))
        self._targets: dict[Link, TargetPair] = {}
        self._lock = threading.Lock()
        self._dialler = Dialler(self, identity, ring)
        self._links: dict[int, Link] = {}
        self._receivings: dict[TransferKey, _Receiving] = {}
        self._last_generation = 0

    # --- lifetime ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ready to dial; call it on the event loop that will carry the sessions."""
        self._dialler.start()
        self._quarantine.start(asyncio.get_running_loop())

    async def close(self) -> None:
        """Ends every link; expected transfers fail. Waits up to 2 s for lane threads. Event loop."""
        await self._dialler.close()

    def set_sources(self, sources: Sequence[KVSource]) -> None:
        """New sources are dialled, and redialled while they stay listed; a link is never closed by leaving. Any
        thread."""
        self._dialler.set_sources(sources)

    def open_sources(self) -> frozenset[int]:
        """Incarnations with a ready session and a warmed lane, heard within 3 s. Any thread."""
        with self._lock:
            return frozenset(incarnation for incarnation, link in self._links.items() if link.is_open)

    def describe_links(self) -> tuple[str, ...]:
        """Over what the open links move KV and why, each way once. Any thread."""
        with self._lock:
            choices = {link.choice for link in self._links.values() if link.is_open}
        return tuple(sorted(f"{choice.transport}: {choice.reason}" for choice in choices))

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
            return receiving.grant.open_blocks + self._shut(receiving)

    def _shut(self, receiving: _Receiving) -> tuple[int, ...]:
        """Nobody writes under the grant from now on but into the returned blocks, which are proven later. No copies of
        an own lane thread: see `open_blocks`."""
        target, grant = receiving.target, receiving.grant
        if target is None:
            return ()
        receiving.target = None
        window = target.revoke(grant.generation)
        blocks: tuple[int, ...] = ()
        if window is not None:
            tables = grant.tables[window.group : window.group + 1]
            blocks = tuple(block for table in tables for block in table[window.page : window.page + 1])
        self._quarantine.retire(target, grant.generation, blocks)
        return blocks

    # --- the state machine's hands (under the lock) -----------------------------------------------------------------

    def _perform(self, receiving: _Receiving, actions: Sequence[GrantAction]) -> list[ReceiverEvent]:
        grant, link, events = receiving.grant, receiving.link, list[ReceiverEvent]()
        for action in actions:
            match action:
                case GrantAction.SEND_GRANT:
                    if not self._open_generation(receiving):
                        return events + self._perform(receiving, grant.fail("grants_exhausted"))
                    num_pages = self._identity.layout.num_blocks(grant.num_tokens)
                    link.send(Grant(*grant.key, grant.generation, pack_tables(grant.tables, num_pages)))
                case GrantAction.SEND_ADOPTED:
                    self._shut(receiving)
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

    def _open_generation(self, receiving: _Receiving) -> bool:
        """Numbers the grant, and lets a one-sided writer in; False when its lane is not open or has no room."""
        receiving.target = self._targets.get(receiving.link)
        generation: int | None = self._last_generation + 1
        if receiving.link.choice.transport in ONE_SIDED:
            generation = receiving.target.grant(self._last_generation) if receiving.target is not None else None
        if generation is None:
            receiving.target = None
            return False
        receiving.grant.generation = self._last_generation = generation
        return True

    def _emit_all(self, events: Sequence[ReceiverEvent]) -> None:
        for event in events:
            self._emit(event)

    # --- links (event loop) -----------------------------------------------------------------------------------------

    def find_link(self, incarnation: int) -> Link | None:
        return self._links.get(incarnation)

    def add_link(self, link: Link) -> None:
        with self._lock:
            self._links[link.peer.incarnation] = link

    def forget_link(self, link: Link) -> None:
        events: list[ReceiverEvent] = []
        with self._lock:
            self._targets.pop(link, None)
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
        is_written = link in self._targets
        limit = MAX_WRITTEN_NOTICES if is_written else MAX_NOTICES
        if link.lane.num_waiting >= limit:
            raise FrameInvalid(f"over {limit} units are announced at once")
        if is_written and not has_digests(link.peer.verify, link.choice.transport):
            self._take_written(link, unit)
        else:
            link.lane.offer(unit)

    def make_lane(self, link: Link, lane_id: bytes, exchange: BlobExchange) -> Lane[Unit]:
        buffers, transport = StagingBuffers(), self._transports[link.choice.transport]

        def open_pair() -> AnyPair:
            pair = transport.open(0, lane_id, exchange)
            if isinstance(pair, TargetPair):
                with self._lock:
                    self._targets[link] = pair
                return pair
            assert isinstance(pair, DataPair), "the receiver's end"
            ticket = pair.receive(torch.empty(WARM_UP_BYTES, dtype=torch.uint8))
            ticket.wait()
            if not is_warm_up(lane_id, ticket.buffer):
                transport.renew()
                raise PeerLost("a stranger is on the lane's data pair")
            return pair

        def post(pair: AnyPair, unit: Unit) -> Ticket | None:
            return pair.receive(buffers.take(unit.num_bytes)) if isinstance(pair, DataPair) else None

        def complete(unit: Unit, ticket: Ticket | None) -> None:
            if ticket is None:
                self._take_written(link, unit)
                return
            ticket.wait()
            self._write(link, unit, ticket.buffer)
            buffers.give(ticket.buffer)

        return Lane(lane_id.hex()[:8], LaneWork(open_pair, post, complete, link.lane_is_warm, link.lane_has_ended))

    def _find(self, link: Link, unit: Unit) -> tuple[_Receiving | None, list[ReceiverEvent]]:
        """The grant that a unit on this link belongs to, and what follows when it does not fit it. Under the lock."""
        receiving = self._receivings.get(TransferKey(unit.stream, unit.attempt))
        if receiving is None or receiving.link is not link or receiving.grant.generation != unit.generation:
            return None, []
        misfit = receiving.grant.misfit_of(unit)
        if misfit is not None:
            return None, self._perform(receiving, receiving.grant.fail(misfit))
        return receiving, []

    def _take_written(self, link: Link, unit: Unit) -> None:
        """Counts a unit that the sender has written itself: none of its blocks is in a window of ours."""
        arrived_us = now_us()
        with self._lock:
            receiving, events = self._find(link, unit)
            is_counted = receiving is not None and receiving.grant.open_window(unit, ())
        if receiving is not None and is_counted:
            digest = None
            if has_digests(link.peer.verify, link.choice.transport):
                part = (unit.first_token, unit.num_tokens, unit.first_layer, unit.num_layers)
                digest = digest_of(as_bytes(gather_unit(self._cache, receiving.grant.tables, *part)))
            with self._lock:
                receiving.trace.append(ArrivedUnit(unit.num_bytes, arrived_us))
                actions, _ = receiving.grant.close_window(unit, (), digest)
                events = self._perform(receiving, actions)
        self._emit_all(events)

    def _write(self, link: Link, unit: Unit, buffer: Tensor) -> None:
        """Writes a received unit into its blocks under the write window, or drops it when nobody grants it any more."""
        arrived_us = now_us()
        layout = self._identity.layout
        with self._lock:
            receiving, events = self._find(link, unit)
            is_writable = False
            if receiving is not None:
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
