"""Workers without a model that speak the real front link on loopback sockets: one event loop, scripted answers.

A decode fake emits the script's token ids once the prefill fake has "computed" the prompt. Counters are those of real
workers: blocks in use return to 0 when a stream ends, whatever ends it.
"""

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field

from kv_transfer.errors import TransferError
from kv_transfer.wire import Connection, KeyRing, establish, server_steps
from workers.protocol import (
    FRONT_CODEC,
    FRONT_PLANE,
    IDENTITY_CODEC,
    Abort,
    Accept,
    Busy,
    BusyReason,
    ComputedPrompt,
    DecodeTimings,
    Delta,
    End,
    Explain,
    Failed,
    FailReason,
    Generate,
    Heartbeat,
    IngressIdentity,
    Load,
    Prefill,
    PrefillEnd,
    PrefillTimings,
    Resume,
    Role,
    Seen,
    StreamKey,
    Tokens,
    WorkerEndpoint,
    WorkerIdentity,
    WorkerState,
    mint_incarnation,
    unpack_tokens,
)

MODEL_ID = "tiny"
BLOCK_TOKENS = 16


def make_ring() -> KeyRing:
    return KeyRing((("k1", b"0123456789abcdef0123456789abcdef"),))


@dataclass
class Script:
    """What the fakes do next; tests change it while they run."""

    tokens: list[int] = field(default_factory=lambda: [10, 11, 12])
    """Output of every stream; END says "stop" when they run out and "length" at max_tokens."""
    busy: list[BusyReason] = field(default_factory=list)
    """Consumed by one reservation each."""
    failures: list[FailReason] = field(default_factory=list)
    """Consumed by one stream each, in place of its first token (decode) or of its work (prefill)."""
    accepts: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: reservations are answered only when it is set again."""
    emits: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: no token and no prefill completes until it is set again."""
    pause_s: float = 0.0
    """Between two tokens."""
    drop_positions: set[int] = field(default_factory=set)
    """Positions whose delta is lost once on its way."""
    gate_after: int | None = None
    """With `emits` cleared, this many tokens still leave."""

    def __post_init__(self) -> None:
        self.accepts.set()
        self.emits.set()


@dataclass
class _Stream:
    request: Generate
    owner: Connection
    blocks: int
    sent: list[int] = field(default_factory=list)
    adopted: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    end: End | None = None


class FakeWorker:
    """Start on the loop of the test; `kill` is a crash, `close` an orderly end."""

    def __init__(self, role: Role, script: Script | None = None, blocks_total: int = 1024) -> None:
        self.role, self.script, self.blocks_total = role, script or Script(), blocks_total
        self.incarnation = mint_incarnation()
        self.state: WorkerState = "ready"
        self.decodes: dict[int, FakeWorker] = {}
        self.lanes: list[int] = []
        self.received: list[object] = []
        self.streams: dict[StreamKey, _Stream] = {}
        self.queued_tokens = 0
        self.computed: Counter[str] = Counter()
        self.is_silent = False
        self.num_refused = 0
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborted: set[StreamKey] = set()
        self._last_dispatch = 0
        self._server: asyncio.Server | None = None
        self.endpoint = WorkerEndpoint(role, self.incarnation, "127.0.0.1", 0, 0)

    @property
    def blocks_in_use(self) -> int:
        return sum(s.blocks for s in self.streams.values())

    def of(self, *kinds: type) -> list[object]:
        """Messages received so far of these kinds."""
        return [m for m in self.received if isinstance(m, kinds)]

    async def start(self) -> WorkerEndpoint:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.endpoint.front_port)
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = WorkerEndpoint(self.role, self.incarnation, "127.0.0.1", port, 0)
        self._own(self._report())
        return self.endpoint

    async def kill(self) -> None:
        """As kill -9: sockets close, nothing is said."""
        if self._server is not None:
            self._server.close()
            await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.streams.clear()

    def cut(self) -> None:
        """Drops every connection; the worker and its streams live on."""
        for connection in list(self._connections):
            connection.abort()

    def _own(self, coroutine: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- the link -----------------------------------------------------------------------------------------------------

    def _identity(self) -> WorkerIdentity:
        return WorkerIdentity(
            self.incarnation, self.role, MODEL_ID, "digest", 4242, 1, BLOCK_TOKENS, self.blocks_total, 8192, 4, 1024
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def check(body: bytes) -> str | None:
            identity = IDENTITY_CODEC.decode(body)
            assert isinstance(identity, IngressIdentity)
            return None if identity.wanted in (0, self.incarnation) else "wrong_incarnation"

        steps = server_steps(make_ring(), FRONT_PLANE, IDENTITY_CODEC.encode(self._identity()), check)
        try:
            connection = await establish(steps, reader, writer, FRONT_CODEC.max_frame_bytes)
        except TransferError:
            self.num_refused += 1
            return
        self._connections.add(connection)
        self._own(self._read(connection))

    async def _read(self, connection: Connection) -> None:
        try:
            while True:
                message = FRONT_CODEC.decode(await connection.receive())
                if not isinstance(message, Heartbeat):
                    self.received.append(message)
                    self._on_message(connection, message)
        except TransferError:
            pass
        finally:
            self._connections.discard(connection)
            connection.abort()

    def _send(self, connection: Connection, message: object) -> None:
        if not self.is_silent:
            connection.send(FRONT_CODEC.encode(message))

    async def _report(self) -> None:
        while True:
            for connection in list(self._connections):
                self._send(connection, self._load())
                self._send(connection, Heartbeat(0))
            await asyncio.sleep(0.02)

    def _load(self) -> Load:
        lanes = tuple(self.lanes) if self.role == "decode" else ()
        computed = ComputedPrompt(**{k: self.computed[k] for k in ("routine", "local", "fallback")})
        running = len(self.streams)
        free = self.blocks_total - self.blocks_in_use
        return Load(
            self.state,
            self._last_dispatch,
            self.blocks_total,
            free,
            0,
            running,
            0,
            self.queued_tokens,
            0,
            lanes,
            computed,
        )

    # --- the work -----------------------------------------------------------------------------------------------------

    def _on_message(self, connection: Connection, message: object) -> None:
        match message:
            case Generate() | Prefill():
                self._last_dispatch = max(self._last_dispatch, message.dispatch)
                self._own(self._reserve(connection, message))
            case Abort():
                self._aborted.add(StreamKey(message.stream, message.attempt))
                self.release(StreamKey(message.stream, message.attempt))
            case Seen():
                self.release(StreamKey(message.stream, message.attempt))
            case Resume():
                self._on_resume(connection, message)
            case _:
                raise AssertionError(f"unexpected {message}")

    def release(self, key: StreamKey) -> None:
        stream = self.streams.pop(key, None)
        if stream is not None and stream.task is not None:
            stream.task.cancel()

    def _on_resume(self, connection: Connection, message: Resume) -> None:
        named = {StreamKey(p.stream, p.attempt): p.count for p in message.positions}
        if message.complete:
            for key in set(self.streams) - set(named):
                self.release(key)
        for key, count in named.items():
            stream = self.streams.get(key)
            if stream is None:
                self._send(connection, Failed(key.stream, key.attempt, "decode", "unknown"))
                continue
            stream.owner = connection
            tokens = tuple(stream.sent[count:])
            self._send(connection, Tokens((Delta(key.stream, key.attempt, count, tokens),)))
            if stream.end is not None:
                self._send(connection, stream.end)

    async def _reserve(self, connection: Connection, message: Generate | Prefill) -> None:
        await self.script.accepts.wait()
        if StreamKey(message.stream, message.attempt) in self._aborted:
            return
        if self.script.busy or self.state != "ready":
            reason: BusyReason = self.script.busy.pop(0) if self.script.busy else "draining"
            self._send(connection, Busy(message.stream, message.attempt, reason))
            return
        key = StreamKey(message.stream, message.attempt)
        if isinstance(message, Prefill):
            self._send(connection, Accept(key.stream, key.attempt, 0, 0))
            await self._prefill(connection, message)
            return
        stream = _Stream(message, connection, math.ceil(len(message.prompt) / 4 / BLOCK_TOKENS) + 1)
        self.streams[key] = stream
        self._send(connection, Accept(key.stream, key.attempt, 0, 0))
        if message.source == 0:
            self.computed["routine" if self.role == "colocated" else message.local] += len(message.prompt) // 4
            stream.adopted.set()
        stream.task = self._own(self._decode(key, stream))

    async def _prefill(self, connection: Connection, message: Prefill) -> None:
        await self.script.emits.wait()
        if self.script.failures:
            reason = self.script.failures.pop(0)
            self._send(connection, Failed(message.stream, message.attempt, "prefill", reason))
            return
        self.computed["routine"] += len(message.prompt) // 4
        decode = self.decodes.get(message.decode)
        stream = decode.streams.get(StreamKey(message.stream, message.attempt)) if decode else None
        if stream is not None:
            stream.adopted.set()
            self._send(
                connection, PrefillEnd(message.stream, message.attempt, PrefillTimings(num_units=1, sent_bytes=64))
            )

    async def _decode(self, key: StreamKey, stream: _Stream) -> None:
        await stream.adopted.wait()
        if self.script.failures:
            self._send(stream.owner, Failed(key.stream, key.attempt, "transfer", self.script.failures.pop(0)))
            return
        limit = stream.request.sampling.max_tokens
        if stream.request.explain:
            self._send(stream.owner, Explain(key.stream, key.attempt, self.role, b'{"top": []}'))
        for token in self.script.tokens[:limit]:
            if self.script.gate_after is None or len(stream.sent) >= self.script.gate_after:
                await self.script.emits.wait()
            position = len(stream.sent)
            stream.sent.append(token)
            if position in self.script.drop_positions:
                self.script.drop_positions.discard(position)
            else:
                self._send(stream.owner, Tokens((Delta(key.stream, key.attempt, position, (token,)),)))
            await asyncio.sleep(self.script.pause_s)
        reason = "length" if len(stream.sent) >= limit else "stop"
        stream.end = End(key.stream, key.attempt, len(stream.sent), reason, DecodeTimings(num_steps=len(stream.sent)))
        self._send(stream.owner, stream.end)


@dataclass
class FakePair:
    """A prefill and a decode fake with an open lane."""

    prefill: FakeWorker
    decode: FakeWorker

    @property
    def endpoints(self) -> list[WorkerEndpoint]:
        return [self.prefill.endpoint, self.decode.endpoint]

    def join(self) -> None:
        self.decode.lanes = [self.prefill.incarnation]
        self.prefill.decodes = {self.decode.incarnation: self.decode}


@contextlib.asynccontextmanager
async def running_pair():
    pair = FakePair(FakeWorker("prefill"), FakeWorker("decode"))
    pair.join()
    await pair.prefill.start()
    await pair.decode.start()
    try:
        yield pair
    finally:
        await pair.prefill.kill()
        await pair.decode.kill()


def prompt_of(request: Generate) -> list[int]:
    return unpack_tokens(request.prompt)
