"""The ingress's end of the front link to one worker: dial, handshake, RESUME, heartbeats, frames, dial again.

Knows frames and silence. What a message means is its owner's business, which it calls on the event loop. The membership
is a hint: the handshake says who answers, and another incarnation than the listed one is refused.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, get_args

from kv_transfer.errors import FrameInvalid, HandshakeFailed, TransferError
from kv_transfer.wire import Connection, KeyRing, client_steps, dial
from router.worker_view import Dispatched, WorkerSnapshot
from workers.protocol import (
    FRONT_CODEC,
    FRONT_PLANE,
    HEARTBEAT_S,
    IDENTITY_CODEC,
    LOST_S,
    SUSPECT_S,
    Cache,
    DownMessage,
    Heartbeat,
    IngressIdentity,
    Load,
    Position,
    Resume,
    UpMessage,
    WorkerEndpoint,
    WorkerIdentity,
    unpack_names,
)

logger = logging.getLogger(__name__)
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0


class LinkOwner(Protocol):
    """Called on the event loop; never blocks."""

    def positions(self, link: "WorkerLink") -> tuple[Position, ...]:
        """The streams that go on over a link that comes up."""

    def on_up(self, link: "WorkerLink") -> None: ...

    def on_message(self, link: "WorkerLink", message: UpMessage) -> None: ...

    def on_broken(self, link: "WorkerLink") -> None:
        """The connection ended; the worker may still be dialled again."""

    def on_lost(self, link: "WorkerLink") -> None:
        """The worker itself counts as gone. Once per break."""


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What a link needs to know of its ingress."""

    ring: KeyRing
    model_id: str
    incarnation: int
    resume_grace_s: float
    clock: Callable[[], float]


class WorkerLink:
    """One worker as this ingress reaches it. Lives on one event loop; `run` is its only task."""

    def __init__(self, endpoint: WorkerEndpoint, facts: LinkFacts, owner: LinkOwner) -> None:
        self.endpoint, self.is_listed = endpoint, True
        self.identity: WorkerIdentity | None = None
        self.load: Load | None = None
        self._facts, self._owner, self._clock = facts, owner, facts.clock
        self._connection: Connection | None = None
        self._last_heard = 0.0
        self._broken_at: float | None = None
        self._engine_idle_ms = 0
        self._is_refusing = False
        self._num_dispatched = 0
        self._pending: deque[Dispatched] = deque(maxlen=4096)
        self._cached: set[bytes] = set()

    @property
    def incarnation(self) -> int:
        return self.endpoint.incarnation

    @property
    def is_up(self) -> bool:
        return self._connection is not None

    @property
    def is_suspect(self) -> bool:
        """Silent for SUSPECT_S, or its engine thread is: no new work, what runs goes on."""
        silence = self._clock() - self._last_heard
        return silence >= SUSPECT_S or self._engine_idle_ms >= SUSPECT_S * 1000

    def snapshot(self) -> WorkerSnapshot:
        return WorkerSnapshot(
            incarnation=self.incarnation,
            role=self.endpoint.role,
            identity=self.identity,
            load=self.load if self.is_up else None,
            is_listed=self.is_listed,
            is_suspect=self.is_suspect,
            is_refusing=self._is_refusing,
            pending=tuple(self._pending),
            cached=self._cached,
        )

    def next_dispatch(self, blocks: int, prompt_tokens: int) -> int:
        """The number for a GENERATE or PREFILL, counted in snapshots until a LOAD counts it."""
        self._num_dispatched += 1
        self._pending.append(Dispatched(self._num_dispatched, blocks, prompt_tokens))
        return self._num_dispatched

    def refuse_until_load(self) -> None:
        """The worker said BUSY: nothing new goes there before its next LOAD."""
        self._is_refusing = True

    def send(self, message: DownMessage) -> None:
        """Queues one frame; without a connection it is dropped, and RESUME tells the worker later."""
        if self._connection is not None:
            self._connection.send(FRONT_CODEC.encode(message))

    async def run(self) -> None:
        """Keeps the link while the worker is listed, and unlisted until the worker closes it. Cancel-safe."""
        backoff_s = FIRST_BACKOFF_S
        while self.is_listed or self._broken_at is not None:
            connection = await self._dial()
            if connection is not None:
                await self._serve(connection)
                backoff_s = FIRST_BACKOFF_S
                continue
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        logger.info("worker link closed role=%s worker=%x", self.endpoint.role, self.incarnation)

    def check_grace(self, now: float) -> None:
        """Call often: a worker that cannot be dialled again within the grace is lost."""
        if self._broken_at is not None and now - self._broken_at >= self._facts.resume_grace_s:
            self._declare_lost("no new connection within the grace")

    async def _dial(self) -> Connection | None:
        identity = IngressIdentity(self._facts.incarnation, self.incarnation)
        steps = client_steps(self._facts.ring, FRONT_PLANE, IDENTITY_CODEC.encode(identity), self._check_identity)
        try:
            return await dial(self.endpoint.host, self.endpoint.front_port, steps, FRONT_CODEC.max_frame_bytes)
        except HandshakeFailed as error:
            logger.warning("worker refused role=%s worker=%x: %s", self.endpoint.role, self.incarnation, error)
            self._declare_lost("another process answers")
        except TransferError as error:
            logger.debug("dial failed role=%s worker=%x: %s", self.endpoint.role, self.incarnation, error)
        return None

    def _check_identity(self, body: bytes) -> None:
        identity = IDENTITY_CODEC.decode(body)
        if not isinstance(identity, WorkerIdentity):
            raise HandshakeFailed("the server is no worker")
        wanted = (self.incarnation, self.endpoint.role, self._facts.model_id)
        answered = (identity.incarnation, identity.role, identity.model_id)
        if wanted != answered:
            raise HandshakeFailed(f"wanted {wanted}, {answered} answered")
        self.identity = identity

    async def _serve(self, connection: Connection) -> None:
        self._connection, self.load, self._is_refusing = connection, None, False
        self._last_heard, self._broken_at, self._engine_idle_ms = self._clock(), None, 0
        self._pending.clear()
        self._cached.clear()
        logger.info("worker link up role=%s worker=%x", self.endpoint.role, self.incarnation)
        self.send(Resume(self._owner.positions(self), complete=True))
        self._owner.on_up(self)
        beat = asyncio.create_task(self._beat(connection), name=f"front-beat-{self.incarnation:x}")
        try:
            await self._read(connection)
        except TransferError as error:
            logger.info("worker link broken role=%s worker=%x: %s", self.endpoint.role, self.incarnation, error)
        finally:
            beat.cancel()
            connection.abort()
            self._connection, self._broken_at = None, self._clock()
        is_silent = self._clock() - self._last_heard >= LOST_S
        self._owner.on_broken(self)
        if is_silent:
            self._declare_lost("silent")

    async def _read(self, connection: Connection) -> None:
        while True:
            message = FRONT_CODEC.decode(await connection.receive())
            self._last_heard = self._clock()
            if isinstance(message, Heartbeat):
                self._engine_idle_ms = message.engine_idle_ms
            elif isinstance(message, get_args(UpMessage)):
                self._note(message)
                self._owner.on_message(self, message)
            else:
                raise FrameInvalid(f"{type(message).__name__} does not go up")

    def _note(self, message: UpMessage) -> None:
        if isinstance(message, Load):
            self.load, self._is_refusing = message, False
            while self._pending and self._pending[0].number <= message.last_dispatch:
                self._pending.popleft()
        elif isinstance(message, Cache):
            if message.is_whole:
                self._cached.clear()
            self._cached.difference_update(unpack_names(message.removed))
            self._cached.update(unpack_names(message.added))

    async def _beat(self, connection: Connection) -> None:
        while self._clock() - self._last_heard < LOST_S:
            connection.send(FRONT_CODEC.encode(Heartbeat(0)))
            await asyncio.sleep(HEARTBEAT_S)
        connection.abort()

    def _declare_lost(self, why: str) -> None:
        if self._broken_at is not None:
            self._broken_at = None
            logger.warning("worker lost role=%s worker=%x: %s", self.endpoint.role, self.incarnation, why)
            self._owner.on_lost(self)
