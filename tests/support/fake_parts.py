"""Stand-ins for the leader and the router, so that Serve, membership, listeners and endings are tested without a
model.
"""

import asyncio
import json
import os
from pathlib import Path

from kv_transfer.wire import KeyRing
from router.config import RouterConfig
from router.resize import Resize
from workers.protocol import WorkerEndpoint, mint_incarnation
from workers.replica.config import ReplicaConfig


class FakeLeader:
    """Listens on loopback and writes down which prefill workers it has heard of."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        self._sources: list[int] = []

    async def start(self) -> WorkerEndpoint:
        KeyRing.load(Path(self._config.secret_path))
        self._server = await asyncio.start_server(self._answer, self._config.host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return WorkerEndpoint(self._config.role, mint_incarnation(), self._config.host, port, port)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"role": self._config.role, "pid": os.getpid(), "sources": self._sources}).encode())
        writer.close()

    def set_sources(self, sources) -> None:
        self._sources = [source.incarnation for source in sources]

    def health(self) -> str | None:
        return None

    async def drain(self) -> None:
        pass

    async def stop(self) -> None:
        self._server.close()


def make_fake_leader(config: ReplicaConfig) -> FakeLeader:
    return FakeLeader(config)


def make_broken_leader(config: ReplicaConfig) -> FakeLeader:
    raise ValueError("the model folder holds no weights")


class FakeRouter:
    """/ready, /workers (what the membership says, each worker asked for its pid and sources), /stream (ends when
    told), /scale/POOL/N.
    """

    def __init__(self, config: RouterConfig, ring: KeyRing, resize: Resize) -> None:
        self._resize = resize
        self._workers: list[WorkerEndpoint] = []
        self._ended = asyncio.Event()

    async def start(self) -> None:
        pass

    def set_workers(self, workers: list[WorkerEndpoint]) -> None:
        self._workers = list(workers)

    async def end_streams(self, reason: str) -> None:
        self._ended.set()
        await asyncio.sleep(0.05)

    async def close(self) -> None:
        pass

    async def app(self, scope, receive, send) -> None:
        if scope["path"] == "/stream":
            await self._stream(send)
            return
        if scope["path"].startswith("/scale/"):
            await self._resize(scope["path"].split("/")[2], int(scope["path"].split("/")[3]))
        body = json.dumps([await self._ask(worker) for worker in self._workers] if scope["path"] == "/workers" else {})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body.encode()})

    async def _stream(self, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while not self._ended.is_set():
            await send({"type": "http.response.body", "body": b"data: tick\n\n", "more_body": True})
            try:
                await asyncio.wait_for(self._ended.wait(), 0.05)
            except TimeoutError:
                pass
        await send({"type": "http.response.body", "body": b'data: {"error":{"code":"shutdown"}}\n\n'})

    async def _ask(self, worker: WorkerEndpoint) -> dict:
        try:
            reader, writer = await asyncio.open_connection(worker.host, worker.front_port)
            answer = json.loads(await reader.read())
            writer.close()
        except OSError:
            answer = {}
        return {"role": worker.role, "incarnation": worker.incarnation, **answer}


def make_fake_router(config: RouterConfig, ring: KeyRing, resize: Resize) -> FakeRouter:
    return FakeRouter(config, ring, resize)
