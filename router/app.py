"""The ingress as one object: an ASGI application, its links to the workers, and its one task group.

Routes, origins and the process edge of request handling stand here; what a completion request goes through is
pipeline.py.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from kv_transfer.wire import KeyRing
from router.config import RouterConfig
from router.dispatcher import Dispatcher
from router.errors import ApiError
from router.exchange import ClientGone, Exchange, Receive, Scope, Send
from router.explain import Explainer
from router.inbox import Inbox
from router.link import LinkFacts, WorkerLink
from router.openai.models import check_model, describe_model
from router.pipeline import Pipeline
from router.resize import Resize, read_resize
from router.status import describe_worker, find_missing
from router.text.tokenizer import Tokenizer
from workers.protocol import WorkerEndpoint, mint_incarnation

logger = logging.getLogger(__name__)
TICK_S = 0.1
ENDING_S = 1.0
"""Clients get this long to take the error event that ends their stream."""
SCALE_BODY_BYTES = 4096
SCALE_BODY_S = 5.0
Handler = Callable[[Exchange], Awaitable[None]]


class Router:
    """One ingress. All methods on one event loop; `start` once, `close` once."""

    def __init__(self, config: RouterConfig, ring: KeyRing, resize: Resize | None = None) -> None:
        self._config, self._clock, self._resize = config, time.monotonic, resize
        self._created = int(time.time())

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._handle(scope, receive, send)

        self.app: Callable[[Scope, Receive, Send], Awaitable[None]] = app
        """The ASGI application; a plain function, as servers tell ASGI 3 by it."""
        self._facts = LinkFacts(ring, config.model_id, mint_incarnation(), config.resume_grace_s, self._clock)
        self._dispatcher = Dispatcher(config, self._clock, random.random)
        self._inbox = Inbox(self._dispatcher, self._clock)
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")
        self._endpoints: Sequence[WorkerEndpoint] = ()
        self._links: dict[int, tuple[WorkerLink, asyncio.Task[None]]] = {}
        self._pipeline: Pipeline | None = None
        self._explainer: Explainer | None = None
        self._group: asyncio.TaskGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/live": {"GET": self._live},
            "/ready": {"GET": self._ready},
            "/health": {"GET": self._health},
            "/version": {"GET": self._version},
            "/baton/status": {"GET": self._status},
            "/baton/explain": {"POST": self._explain},
            "/baton/scale": {"POST": self._scale},
        }

    async def start(self) -> None:
        """Loads the tokenizer and begins to dial. Raises ValueError when the model folder holds none that we can
        stream.
        """
        tokenizer = await asyncio.to_thread(Tokenizer, Path(self._config.model_path))
        self._pipeline = Pipeline(self._config, tokenizer, self._dispatcher, self._clock, self._threads)
        self._explainer = Explainer(Path(self._config.model_path), tokenizer, self._dispatcher, self._pipeline)
        started = asyncio.Event()
        self._runner = asyncio.create_task(self._run(started), name="router")
        await started.wait()
        self.set_workers(self._endpoints)

    def set_workers(self, endpoints: Sequence[WorkerEndpoint], may_come: bool = True) -> None:
        """Dials what is new; what left the list gets no new work, and its link stays until the worker closes it.

        `may_come` False says that no further worker will start: with none at hand requests are then refused at once.
        """
        self._endpoints = tuple(endpoints)
        if self._group is None or self._pipeline is None:
            return
        self._pipeline.may_come = may_come
        listed = {endpoint.incarnation for endpoint in endpoints}
        for incarnation, (link, _) in self._links.items():
            link.is_listed = incarnation in listed
        for endpoint in endpoints:
            if endpoint.incarnation not in self._links:
                link = WorkerLink(endpoint, self._facts, self._inbox)
                self._dispatcher.add_link(link)
                self._links[endpoint.incarnation] = link, self._group.create_task(self._keep(link))

    async def end_streams(self, reason: str) -> None:
        """Refuses new requests and ends every open one by an error event, or by a 503 where no answer was begun."""
        if self._pipeline is not None:
            self._pipeline.is_closing = True
        self._dispatcher.end_all(ApiError("shutting_down", f"The server ends this answer: {reason}.", retry_after_s=5))
        try:
            async with asyncio.timeout(ENDING_S):
                await self._dispatcher.wait_empty()
        except TimeoutError:
            logger.warning("%d clients took no ending within %g s", self._dispatcher.num_open, ENDING_S)

    async def close(self) -> None:
        """Ends what is open and every task. Idempotent."""
        await self.end_streams("shutdown")
        self._stopping.set()
        if self._runner is not None:
            await self._runner
        self._threads.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, object]:
        """The pools, the queue and the open streams as a JSON document."""
        queue = self._dispatcher.queue
        return {
            "model": self._config.model_id,
            "disaggregation": self._config.disaggregation,
            "workers": [describe_worker(w) for w in self._dispatcher.snapshots()],
            "queued": len(queue),
            "queue": queue.count_by_label(),
            "open_streams": self._dispatcher.num_open,
        }

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI scope. A fault of ours is logged with its id and answered by a 500 in OpenAI's shape."""
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._config.slow_client_s)
        try:
            await self._answer(exchange)
        except ClientGone:
            pass
        except Exception:  # the process edge of request handling
            logger.exception("request failed path=%s", exchange.path[:128])
            if not exchange.status:
                await exchange.send_error(ApiError("internal", "The server failed on this request."))

    # --- routes -----------------------------------------------------------------------------------------------------

    async def _answer(self, exchange: Exchange) -> None:
        try:
            _check_origin(exchange, self._config.allowed_hosts)
            await self._find_handler(exchange)(exchange)
        except ApiError as error:
            await exchange.send_error(error)

    def _find_handler(self, exchange: Exchange) -> Handler:
        methods = self._routes.get(exchange.path)
        if methods is None and exchange.path.startswith("/v1/models/"):
            methods = {"GET": self._model}
        if methods is None:
            raise ApiError("not_found", f"Unknown request URL: {exchange.method} {exchange.path[:128]}.")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allow = ", ".join(methods)
            message = f"{exchange.method} is not allowed on {exchange.path[:128]}; use {allow}."
            raise ApiError("method_not_allowed", message, allow=allow)
        return handler

    async def _chat(self, exchange: Exchange) -> None:
        await self._ready_pipeline().serve(exchange, "chat")

    async def _completions(self, exchange: Exchange) -> None:
        await self._ready_pipeline().serve(exchange, "completions")

    async def _explain(self, exchange: Exchange) -> None:
        pipeline = self._ready_pipeline()
        assert self._explainer is not None
        await pipeline.serve(exchange, "chat", self._explainer.reply)

    def _ready_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise ApiError("no_capacity", "The server is starting.", retry_after_s=1)
        return self._pipeline

    def _describe_model(self) -> dict[str, object]:
        return describe_model(self._config.model_id, self._created, self._config.max_context_tokens)

    async def _models(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"object": "list", "data": [self._describe_model()]})

    async def _model(self, exchange: Exchange) -> None:
        check_model(exchange.path.removeprefix("/v1/models/"), self._config.model_id)
        await exchange.send_json(200, self._describe_model())

    async def _live(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"status": "live"})

    async def _ready(self, exchange: Exchange) -> None:
        pipeline = self._ready_pipeline()
        if pipeline.is_closing:
            raise ApiError("shutting_down", "The server is shutting down.")
        num_queued, limit = len(self._dispatcher.queue), self._config.max_queued
        if num_queued >= limit:
            raise ApiError(
                "no_capacity", f"The queue is full: {num_queued} of {limit}.", code="queue_full", retry_after_s=1
            )
        await exchange.send_json(200, {"status": "ready", "queued": num_queued})

    async def _health(self, exchange: Exchange) -> None:
        missing = find_missing(self._dispatcher.snapshots(), self._config.disaggregation)
        if missing is not None:
            raise ApiError("no_capacity", f"No token can be produced now: {missing}.", code=missing, retry_after_s=1)
        await exchange.send_json(200, {"status": "healthy"})

    async def _version(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"version": self._config.version})

    async def _status(self, exchange: Exchange) -> None:
        await exchange.send_json(200, self.status())

    async def _scale(self, exchange: Exchange) -> None:
        if self._resize is None:
            raise ApiError("not_found", "Nothing here can change the size of a pool.")
        pool, replicas = read_resize(await exchange.read_body(SCALE_BODY_BYTES, SCALE_BODY_S))
        await self._resize(pool, replicas)
        logger.info("pool %s is to have %d replicas", pool, replicas)
        await exchange.send_json(200, {"pool": pool, "replicas": replicas})

    # --- tasks ------------------------------------------------------------------------------------------------------

    async def _run(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            ticker = group.create_task(self._tick())
            started.set()
            await self._stopping.wait()
            self._group = None
            ticker.cancel()
            for _, task in self._links.values():
                task.cancel()

    async def _tick(self) -> None:
        while True:
            now = self._clock()
            for link, _ in list(self._links.values()):
                link.check_grace(now)
            try:
                self._dispatcher.tick()
            except (
                Exception
            ):  # the edge of the housekeeping loop: one bad stream must not stop the deadlines of the others
                logger.exception("housekeeping failed")
            await asyncio.sleep(TICK_S)

    async def _keep(self, link: WorkerLink) -> None:
        try:
            while link.is_listed or link.is_up:
                try:
                    await link.run()
                except Exception:  # the edge of a link's task: its worker counts as lost, the others go on
                    logger.exception("worker link failed worker=%x", link.incarnation)
                    self._inbox.on_lost(link)
                    await asyncio.sleep(1.0)
        finally:
            self._dispatcher.drop_link(link)
            self._links.pop(link.incarnation, None)


def _check_origin(exchange: Exchange, allowed_hosts: Sequence[str]) -> None:
    """A browser page of another origin, or one whose name was rebound to this machine, may not use a server that trusts
    whoever reaches it. Raises `ApiError`.
    """
    origin, named = exchange.header(b"origin"), (exchange.header(b"host") or b"").decode("latin-1")
    try:
        host = urlsplit("//" + named)
        is_allowed = not allowed_hosts or host.hostname in allowed_hosts
        page = urlsplit((origin or b"").decode("latin-1"))
        default = {"http": 80, "https": 443}.get(page.scheme)
        is_same = page.hostname is not None and page.hostname == host.hostname
        is_same = is_same and (page.port or default) == (host.port or default)
    except ValueError:
        is_allowed = is_same = False
    if not is_allowed:
        message = f"This server answers to {', '.join(allowed_hosts)}; the Host header names another."
        raise ApiError("foreign_origin", message, code="foreign_host")
    if origin is not None and not is_same:
        raise ApiError("foreign_origin", "Requests from pages of another origin are refused.")


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
