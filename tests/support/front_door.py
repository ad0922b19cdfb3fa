"""A router behind a real HTTP server in a thread of its own, for tests of the whole path without Ray."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import uvicorn

from kv_transfer.wire import KeyRing
from router.app import Router
from router.config import RouterConfig
from router.stream import Deadlines, Finished, LiveStream, Marks
from tests.support.ports import free_port
from workers.protocol import SamplingParams, WorkerEndpoint

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Generated:
    """What one stream became."""

    tokens: tuple[int, ...]
    stream: LiveStream


class FrontDoor:
    """`url` serves HTTP; `generate` submits token ids behind it. Use as a context manager."""

    def __init__(self, config: RouterConfig, ring: KeyRing) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front-door", daemon=True)
        self.router = Router(config, ring)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self.router.app(scope, receive, send)

        self._server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error", lifespan="off", ws="none")
        )
        self._serving: asyncio.Task[None] | None = None
        self._sequence = itertools.count()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 600.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def __enter__(self) -> "FrontDoor":
        self._thread.start()
        self.run(self._open())
        wait_until(lambda: self._server.started, "the HTTP server is up")
        return self

    async def _open(self) -> None:
        await self.router.start()
        self._serving = asyncio.create_task(self._server.serve())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        await self.router.close()
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving

    def set_workers(self, endpoints: Sequence[WorkerEndpoint]) -> None:
        async def tell() -> None:
            self.router.set_workers(list(endpoints))

        self.run(tell())

    def status(self) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            return self.router.status()

        return self.run(read())

    def wait_ready(self, num_workers: int, timeout_s: float = 60.0) -> None:
        """Every worker's link is up and decode holds a warm lane to each prefill worker."""

        def is_ready() -> bool:
            workers = self.status()["workers"]
            num_prefill = sum(w["pool"] == "prefill" for w in workers)
            lanes = [len(w.get("open_lanes", ())) for w in workers if w["pool"] == "decode"]
            return len([w for w in workers if w.get("state") == "ready"]) == num_workers and all(
                n == num_prefill for n in lanes
            )

        wait_until(is_ready, f"{num_workers} workers are ready", timeout_s)

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """No stream is open and no block is in use or in quarantine on any worker."""

        def is_idle() -> bool:
            status = self.status()
            used = [
                w["blocks_in_use"] + w["blocks_quarantined"] + w["running"] + w["waiting"] for w in status["workers"]
            ]
            return status["open_streams"] == 0 and not any(used)

        wait_until(is_idle, lambda: f"everything is back at zero: {self.status()}", timeout_s)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        stagger_s: float = 0.0,
        explain: bool = False,
    ) -> list[Generated]:
        """Every prompt's tokens; all at once, each submitted `stagger_s` after the one before."""
        return self.run(self._generate_all(prompts, sampling, stagger_s, explain))

    async def _generate_all(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, stagger_s: float, explain: bool
    ) -> list[Generated]:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for prompt in prompts:
                tasks.append(group.create_task(self._generate(prompt, sampling, explain)))
                await asyncio.sleep(stagger_s)
        return [task.result() for task in tasks]

    async def _generate(self, prompt: Sequence[int], sampling: SamplingParams, explain: bool) -> Generated:
        dispatcher, now = self.router._dispatcher, time.monotonic()
        deadlines = Deadlines(first_token_at=now + 600.0, progress_s=60.0, total_at=None)
        stream = LiveStream(list(prompt), sampling, deadlines, Marks(now), next(self._sequence), explain)
        dispatcher.submit(stream)
        try:
            while stream.outcome is None:
                await stream.wait_beyond(len(stream.tokens))
        finally:
            dispatcher.leave(stream, "disconnect")
        assert isinstance(stream.outcome, Finished), f"the stream failed: {stream.outcome}"
        return Generated(tuple(stream.tokens), stream)


def wait_until(
    is_true: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = 10.0, period_s: float = 0.02
) -> None:
    """Polls with a deadline; fails saying what did not come true."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        threading.Event().wait(period_s)
