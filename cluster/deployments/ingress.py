"""The front door under Ray Serve: hands HTTP to the router's ASGI application and the pools' membership to the
router.
"""

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cluster.logs import open_log
from cluster.loopback import move_replica_listener
from kv_transfer.wire import KeyRing
from router.config import RouterConfig
from router.resize import Resize
from workers.protocol import WorkerEndpoint

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]


class IngressRouter(Protocol):
    """What the ingress needs of `router.app.Router`."""

    @property
    def app(self) -> AsgiApp: ...

    async def start(self) -> None: ...

    def set_workers(self, workers: list[WorkerEndpoint]) -> None: ...

    async def end_streams(self, reason: str) -> None: ...

    async def close(self) -> None: ...


MakeRouter = Callable[[RouterConfig, KeyRing, Resize], IngressRouter]


def load_router(config: RouterConfig, ring: KeyRing, resize: Resize) -> IngressRouter:
    """The real router with its tokenizer loaded."""
    from router.app import Router

    return Router(config, ring, resize)


class Ingress:
    """Constructed by Serve, inside `serve.ingress()`. `pools` are held for membership only; no request goes through
    them.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self,
        config: RouterConfig,
        secret_path: str,
        make_router: MakeRouter,
        pools: "Sequence[DeploymentHandle]",
        log_folder: str = "",
    ) -> None:
        from cluster.membership import watch
        from cluster.scaling import PoolScaler

        open_log(log_folder, f"ingress-{os.getpid()}")
        move_replica_listener()
        scaler = PoolScaler([handle.deployment_name for handle in pools])
        self._router = await asyncio.to_thread(make_router, config, KeyRing.load(Path(secret_path)), scaler.resize)
        await self._router.start()
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, tuple[WorkerEndpoint, ...]] = {}
        for handle in pools:
            watch(handle, functools.partial(self._hear, handle.deployment_name))

    def _hear(self, pool: str, workers: tuple[WorkerEndpoint, ...]) -> None:
        """On Serve's router thread."""
        self._loop.call_soon_threadsafe(self._apply, pool, workers)

    def _apply(self, pool: str, workers: tuple[WorkerEndpoint, ...]) -> None:
        self._workers[pool] = workers
        self._router.set_workers([worker for known in self._workers.values() for worker in known])

    def __serve_build_asgi_app__(self) -> AsgiApp:
        """A plain coroutine function: uvicorn takes any other callable for ASGI 2. Serve owns the lifespan, the router
        none.
        """

        async def app(scope: AsgiMessage, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _answer_lifespan(receive, send)
            else:
                await self._router.app(scope, receive, send)

        return app

    async def end_streams(self, reason: str) -> None:
        """Every open stream has got an error event; called by the CLI before it ends the cluster."""
        await self._router.end_streams(reason)

    async def __del__(self) -> None:
        router = getattr(self, "_router", None)
        if router is not None:
            await router.close()


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
