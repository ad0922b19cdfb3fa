"""One peer: its session, its lane, its heartbeat, and the one way in which all of it ends.

Knows connections and time. Knows no transfer: messages go to a `LinkOwner`. A link is session plus lane; when either
breaks, or the peer falls silent, the whole link ends and is never repaired: a new one has new random ids.

Everything runs on the event loop except `send`, `send_lane` and `end`, which any thread may call.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kv_transfer.choice import Choice
from kv_transfer.errors import DeadlineExceeded, PeerLost, TransferError
from kv_transfer.lane import BlobExchange, Lane
from kv_transfer.messages import (
    LANE_CODEC,
    SESSION_CODEC,
    Blob,
    Heartbeat,
    KVIdentity,
    LaneMessage,
    SessionMessage,
    Unit,
)
from kv_transfer.wire import Connection

HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
LOST_S = 10.0
TICK_S = 0.25
LANE_ARRIVES_S = 5.0


class Silence:
    """How long the peer has said nothing while we were listening.

    A stall of our own (a stopped process, a held loop) is no silence of the peer: one tick counts at most twice its
    length.
    """

    def __init__(self, now: float) -> None:
        self._last_tick, self.seconds = now, 0.0

    def heard(self) -> None:
        self.seconds = 0.0

    def tick(self, now: float) -> None:
        self.seconds += min(now - self._last_tick, 2 * TICK_S)
        self._last_tick = now

    @property
    def is_suspect(self) -> bool:
        return self.seconds >= SUSPECT_S

    def is_lost(self, has_bytes_in_flight: bool) -> bool:
        return self.seconds >= (SUSPECT_S if has_bytes_in_flight else LOST_S)


class LinkOwner(Protocol):
    """What a link tells its owner; all on the event loop."""

    def on_message(self, link: "Link", message: SessionMessage) -> None:
        """May raise `TransferError`: the link then ends."""
        ...

    def on_unit(self, link: "Link", unit: Unit) -> None:
        """May raise `TransferError`: the link then ends."""
        ...

    def on_open(self, link: "Link", is_open: bool) -> None:
        """The lane is warm and the peer is heard, or no longer."""
        ...

    def make_lane(self, link: "Link", lane_id: bytes, exchange: BlobExchange) -> "Lane[Any]": ...


class LinkHolder(LinkOwner, Protocol):
    """An owner that also keeps the links; all on the event loop."""

    def find_link(self, incarnation: int) -> "Link | None": ...

    def add_link(self, link: "Link") -> None: ...

    def forget_link(self, link: "Link") -> None:
        """The link has ended: what it carried fails."""
        ...


class Link:
    """`lane_arrives` yields the lane's connection and its random id once it is dialled or accepted."""

    def __init__(
        self, owner: LinkOwner, peer: KVIdentity, choice: Choice, session: bytes, connection: Connection,
        lane_arrives: Callable[[], Awaitable[tuple[Connection, bytes]]],
    ) -> None:  # fmt: skip
        self.peer, self.choice, self.session = peer, choice, session
        self.closed = asyncio.Event()
        self.lane: Lane[Any] | None = None
        self.is_open = self.was_open = False
        self._owner, self._connection, self._lane_arrives = owner, connection, lane_arrives
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(self._loop.time())
        self._lane_connection: Connection | None = None
        self._is_lane_warm = False
        self._lane_ended = asyncio.Event()
        self._ended: asyncio.Future[str] = self._loop.create_future()

    # --- any thread -------------------------------------------------------------------------------------------------

    def send(self, message: SessionMessage) -> None:
        """Queues a message; frames leave in the order of the calls. An ended link swallows it."""
        self._call(self._connection.send, SESSION_CODEC.encode(message))

    def send_lane(self, message: LaneMessage) -> None:
        if self._lane_connection is not None:
            self._call(self._lane_connection.send, LANE_CODEC.encode(message))

    def end(self, reason: str) -> None:
        """The link ends soon; idempotent."""
        self._call(self._end, reason)

    def lane_is_warm(self) -> None:
        self._call(self._set_warm)

    def lane_has_ended(self, reason: str) -> None:
        self._call(self._lane_ended.set)
        self.end(reason)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop has closed: the process is ending and nobody is left to tell

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Serves the link until it ends; returns why. Afterwards both connections and the lane are closed.
        Cancel-safe."""
        reason = "shutdown"
        try:
            async with asyncio.TaskGroup() as group:
                for part in (self._read_session(), self._read_lane(), self._beat(), self._await_end()):
                    group.create_task(part)
        except* TransferError as errors:
            reason = str(errors.exceptions[0])
        finally:
            self._close(reason)
        return reason

    @property
    def has_lane_ended(self) -> bool:
        return self.lane is None or self._lane_ended.is_set()

    async def wait_lane_ended(self, timeout_s: float) -> bool:
        """Whether the lane's thread has ended within the time."""
        if self.has_lane_ended:
            return True
        try:
            await asyncio.wait_for(self._lane_ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _close(self, reason: str) -> None:
        self._end(reason)
        self._connection.abort()
        if self._lane_connection is not None:
            self._lane_connection.abort()
        if self.lane is not None:
            self.lane.close(reason)
        self._is_lane_warm = False
        self._update_open()
        self.closed.set()

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    def _set_warm(self) -> None:
        self._is_lane_warm = not self._ended.done()
        self._update_open()

    def _update_open(self) -> None:
        is_open = self._is_lane_warm and not self._silence.is_suspect
        if is_open != self.is_open:
            self.is_open = is_open
            self.was_open |= is_open
            self._owner.on_open(self, is_open)

    async def _await_end(self) -> None:
        raise PeerLost(await self._ended)

    async def _read_session(self) -> None:
        while True:
            message = SESSION_CODEC.decode(await self._connection.receive())
            self._silence.heard()
            if not isinstance(message, Heartbeat):
                self._owner.on_message(self, message)  # type: ignore[arg-type]  # the codec knows no other types

    async def _read_lane(self) -> None:
        try:
            async with asyncio.timeout(LANE_ARRIVES_S):
                connection, lane_id = await self._lane_arrives()
        except TimeoutError:
            raise DeadlineExceeded(f"no lane within {LANE_ARRIVES_S} s") from None
        self._lane_connection = connection
        exchange = BlobExchange(lambda blob: self.send_lane(Blob(blob)))
        self.lane = self._owner.make_lane(self, lane_id, exchange)
        self.lane.start()
        try:
            while True:
                message = LANE_CODEC.decode(await connection.receive())
                if isinstance(message, Blob):
                    exchange.feed(message.data)
                else:
                    assert isinstance(message, Unit)
                    self._owner.on_unit(self, message)
        finally:
            exchange.fail()

    async def _beat(self) -> None:
        beat = SESSION_CODEC.encode(Heartbeat())
        next_beat = self._loop.time()
        while True:
            now = self._loop.time()
            if now >= next_beat:
                self._connection.send(beat)
                next_beat = now + HEARTBEAT_S
            self._silence.tick(now)
            self._update_open()
            if self._silence.is_lost(self.lane is not None and self.lane.num_in_flight > 0):
                raise PeerLost("silent")
            await asyncio.sleep(TICK_S)
