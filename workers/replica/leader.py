"""The leader of a replica: engine thread, I/O loop, KV session, front links. The first file of `replica/` to read.

    I/O loop (one thread)          engine thread
    front links, KV session  --->  inbox -> role -> engine.step() -> role -> outbox  ---> front links
    heartbeats                     every decision is taken here

Built in any thread; `start`, `drain` and `stop` may be awaited on any event loop: the replica's own I/O runs on a loop
of its own thread, so that heartbeats go on whatever the caller's loop or the engine does.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kv_transfer.channel import KVReceiver, KVSender
from kv_transfer.events import KVSource
from kv_transfer.messages import KVIdentity
from kv_transfer.pairing import choose_sources
from kv_transfer.transports.select import find_host_id, make_transports
from kv_transfer.wire import KeyRing
from workers.engine.cost import MeasuredCosts
from workers.engine.engine import Engine
from workers.model.progress import Progress, ignore_progress
from workers.protocol import (
    Abort,
    Generate,
    Load,
    Prefill,
    Resume,
    Seen,
    StreamKey,
    WorkerEndpoint,
    WorkerIdentity,
    mint_incarnation,
)
from workers.replica.config import ReplicaConfig
from workers.replica.decode import DecodeRole
from workers.replica.desk import Desk
from workers.replica.lifecycle import Lifecycle
from workers.replica.link import FrontLink, Inbound, LinkDown, LinkUp, NewsLost
from workers.replica.loading import LoadedModel, load_model
from workers.replica.prefill import PrefillRole
from workers.replica.prefix_news import PrefixNews

logger = logging.getLogger(__name__)

LOAD_PERIOD_S = 0.25
LOAD_MIN_GAP_S = 0.02
STUCK_S = 30.0
STOP_TIMEOUT_S = 3.0

T = TypeVar("T")


def _die(error: BaseException) -> None:
    """A replica whose engine failed holds no state worth keeping: it ends at once and is replaced."""
    logger.critical("engine thread failed, ending the worker", exc_info=error)
    os._exit(1)


class Leader:
    """One replica. `on_fatal` runs on the engine thread when a step raises; by default the process ends."""

    def __init__(
        self,
        config: ReplicaConfig,
        on_fatal: Callable[[BaseException], None] = _die,
        progress: Progress = ignore_progress,
    ) -> None:
        self.config, self._on_fatal = config, on_fatal
        self.incarnation = mint_incarnation()
        self.model: LoadedModel = load_model(config, progress)
        self.engine = Engine(self.model.engine_config, self.model.runner, costs=MeasuredCosts(self.model.costs))
        self._news = PrefixNews(self.engine.prefixes)
        self.lifecycle = Lifecycle()
        self._desk = Desk(
            config.role, "prefill" if config.role == "prefill" else "decode", self.lifecycle, time.monotonic
        )
        self._ring = KeyRing.load(Path(config.secret_path))
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last_turn = time.monotonic()
        self._last_load: tuple[float, Load | None] = (0.0, None)
        self._ingresses: set[int] = set()
        self._stopping = threading.Event()
        self._sender: KVSender | None = None
        self._receiver: KVReceiver | None = None
        self._role = self._make_role()
        self._link = FrontLink(self._identity(), self._ring, config.host, self._deliver, self._engine_idle_ms)
        self._loop = asyncio.new_event_loop()
        self._io = threading.Thread(target=self._loop.run_forever, name="baton-io", daemon=True)
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)

    # --- construction -----------------------------------------------------------------------------------------------

    def _make_role(self) -> PrefillRole | DecodeRole:
        config, model = self.config, self.model
        if config.role == "colocated":
            return DecodeRole(config, self.engine, None, self._desk)
        transports = make_transports(config.transport, config.host, model.shm_fault, model.pool)
        logger.info("KV may move over %s; shm: %s", ", ".join(transports), model.shm_fault or "possible")
        identity = KVIdentity(
            self.incarnation, model.digest, model.layout, host_id=find_host_id(), transports=tuple(transports),
            verify=config.verify,
        )  # fmt: skip
        shared: dict[str, Any] = {
            "identity": identity, "ring": self._ring, "data": model.data, "transports": transports,
            "emit": lambda event: self._inbox.put(lambda: self._role.transfer(event)),
        }  # fmt: skip
        if config.role == "prefill":
            self._sender = KVSender(**shared, host=config.host)
            role = PrefillRole(config, self.engine, self._sender, model.layout, self._desk)
            self.engine.observer = role
            return role
        self._receiver = KVReceiver(**shared)
        return DecodeRole(config, self.engine, self._receiver, self._desk)

    def _identity(self) -> WorkerIdentity:
        config, model = self.config, self.model
        return WorkerIdentity(
            incarnation=self.incarnation, role=config.role, model_id=config.model_id, model_digest=model.digest,
            pid=os.getpid(), ranks=1, block_tokens=config.block_tokens, blocks_total=config.num_blocks,
            max_context_tokens=config.max_context_tokens, headroom_blocks=config.headroom_blocks,
            kv_bytes_per_token=model.layout.bytes_per_token, windows=self.engine.config.windows,
        )  # fmt: skip

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> WorkerEndpoint:
        """Opens the listeners and starts the threads; the replica is then READY. Call once."""
        self._io.start()
        front_port = await self._on_io(self._link.start())
        kv_port = await self._on_io(self._sender.start()) if self._sender is not None else 0
        if self._receiver is not None:
            await self._on_io(self._receiver.start())
        self.lifecycle.become("ready")
        self._thread.start()
        logger.info("%s worker %016x ready", self.config.role, self.incarnation)
        return WorkerEndpoint(self.config.role, self.incarnation, self.config.host, front_port, kv_port)

    def set_sources(self, sources: Sequence[KVSource]) -> None:
        """The prefill workers of the membership; decode dials new ones ahead of any request. Thread-safe."""
        if self._receiver is not None:
            self._receiver.set_sources(choose_sources(self.incarnation, sources))

    def health(self) -> str | None:
        """None, or what is wrong with this worker in one sentence. Thread-safe."""
        if self._thread.ident is not None and not self._thread.is_alive() and not self._stopping.is_set():
            return "the engine thread has ended"
        if self._engine_idle_ms() > STUCK_S * 1000:
            return f"no step finished for {self._engine_idle_ms() / 1000:.0f} s, limit {STUCK_S:.0f} s"
        return self._role.quarantine_fault() if isinstance(self._role, DecodeRole) else None

    async def drain(self) -> None:
        """Refuses new work; returns when the last stream has ended, at the latest after drain_timeout_s, failing the
        rest."""
        self._inbox.put(lambda: self.lifecycle.become("draining"))
        deadline = time.monotonic() + self.config.drain_timeout_s
        # What is awaited is another thread's state.
        while self._desk.streams.live() and time.monotonic() < deadline and self._thread.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._inbox.put(self._role.fail_rest)

    async def stop(self) -> None:
        """Ends threads, links and sessions within STOP_TIMEOUT_S each. Idempotent."""
        if self._stopping.is_set() or self._io.ident is None:
            return
        self._inbox.put(self._stopping.set)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        self._stopping.set()
        for closing in (self._sender, self._receiver, self._link):
            if closing is not None:
                await self._on_io(closing.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._io.join, STOP_TIMEOUT_S)
        if not self._io.is_alive():
            self._loop.close()

    async def _on_io(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: concurrent.futures.Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return await asyncio.wrap_future(future)

    def _engine_idle_ms(self) -> int:
        return int((time.monotonic() - self._last_turn) * 1000)

    # --- the engine thread ------------------------------------------------------------------------------------------

    def _deliver(self, ingress: int, message: Inbound) -> None:
        self._inbox.put(lambda: self._handle(ingress, message))

    def _handle(self, ingress: int, message: Inbound) -> None:
        match message:
            case Generate():
                self._role.generate(ingress, message)
            case Prefill():
                self._role.prefill(ingress, message)
            case Abort():
                self._role.abort(message)
            case Seen():
                self._desk.streams.remove(StreamKey(message.stream, message.attempt))
            case Resume():
                for attempt in self._desk.resume(ingress, message):
                    self._role.drop(attempt)
            case LinkUp():
                self._ingresses.add(ingress)
                self._desk.streams.link_up(ingress)
                self._last_load = (0.0, None)
                self._news.start_over(ingress)
            case NewsLost():
                self._news.start_over(ingress)
            case LinkDown():
                self._ingresses.discard(ingress)
                self._desk.dispatches.pop(ingress, None)
                self._desk.streams.link_down(ingress, time.monotonic())

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take_inbox()
                self._check_deadlines(time.monotonic())
                self._flush()  # an ACCEPT does not wait for the step
                if self.engine.has_work:
                    self._role.stepped(self.engine.step())
                    self._flush()
                self._last_turn = time.monotonic()
        except BaseException as error:  # noqa: BLE001  # process edge: whatever it is, this replica cannot go on
            self._on_fatal(error)

    def _flush(self) -> None:
        now = time.monotonic()
        self._post_load(now)
        for ingress, frames in self._news.take(self._ingresses, now).items():
            for frame in frames:
                self._desk.post(ingress, frame)
        batches = self._desk.take_outbox()
        if batches:
            self._link.send(batches)

    def _take_inbox(self) -> None:
        """Waits for the first item only while the engine has nothing to do."""
        try:
            self._inbox.get(timeout=0.0 if self.engine.has_work else LOAD_PERIOD_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _check_deadlines(self, now: float) -> None:
        streams = self._desk.streams
        for attempt in streams.overdue(now):
            self._role.expire(attempt)
        for attempt in streams.orphans(now):
            self._role.drop(attempt)
        streams.forget_old(now)

    def _post_load(self, now: float) -> None:
        posted_at, posted = self._last_load
        if not self._ingresses or now - posted_at < LOAD_MIN_GAP_S:
            return
        load = self._load()
        if load == posted and now - posted_at < LOAD_PERIOD_S:
            return
        self._last_load = (now, load)
        for ingress in self._ingresses:
            counted = self._desk.dispatches.get(ingress, 0)
            self._desk.post(ingress, dataclasses.replace(load, last_dispatch=counted))

    def _kv_over(self) -> tuple[str, ...]:
        end = self._sender or self._receiver
        return () if end is None else end.describe_links()

    def _load(self) -> Load:
        pool, role = self.engine.pool, self._role
        return Load(
            state=self.lifecycle.state,
            last_dispatch=0,
            blocks_total=self.config.num_blocks,
            blocks_free=self.engine.num_available_blocks,
            blocks_quarantined=pool.num_quarantined,
            running=self.engine.count("running") + self.engine.count("held"),
            waiting=self.engine.count("reserved") + self.engine.count("preempted"),
            queued_tokens=self.engine.queued_tokens,
            itl_us=int(role.itl_us) if isinstance(role, DecodeRole) else 0,
            open_lanes=tuple(sorted(self._receiver.open_sources())) if self._receiver is not None else (),
            computed_prompt=self.engine.computed_prompt,
            blocks_cached=pool.num_cached,
            kv_over=self._kv_over(),
        )
