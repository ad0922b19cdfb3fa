"""An ingress under a real uvicorn on a loopback port, in the test's own event loop, with fake workers behind it."""

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from tokenizers import Tokenizer

from router.app import Router
from router.config import RouterConfig
from router.resize import Resize
from tests.support.fake_worker import MODEL_ID, FakePair, make_ring, running_pair
from tests.support.tiny_tokenizer import write_model_folder


@dataclass
class Ingress:
    router: Router
    pair: FakePair
    client: httpx.AsyncClient
    port: int
    tokenizer: Tokenizer

    def say(self, text: str, eos: bool = True) -> None:
        """What the decode fake answers from now on."""
        self.pair.decode.script.tokens = self.tokenizer.encode(text).ids + ([2] if eos else [])

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(**fields))

    async def until_idle(self) -> None:
        """Both fakes hold no stream and no block."""
        await until(lambda: not self.pair.decode.streams and not self.router.status()["open_streams"])


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": "hi"}]} | fields


async def until(is_true, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.005)


def parse_events(text: str) -> list[object]:
    """The documents of an event stream; `[DONE]` stays a string."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.strip()]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextlib.asynccontextmanager
async def running_ingress(
    folder: Path, *, ready: bool = True, resize: Resize | None = None, **config: object
) -> AsyncIterator[Ingress]:
    write_model_folder(folder)
    settings = dataclasses.replace(RouterConfig(model_id=MODEL_ID, model_path=str(folder)), **config)
    async with running_pair() as pair:
        router = Router(settings, make_ring(), resize)
        await router.start()
        router.set_workers(pair.endpoints)
        server = uvicorn.Server(uvicorn.Config(router.app, log_config=None, lifespan="off"))
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # a client that reads nothing is felt soon
        port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                if ready:
                    await until(lambda: all(w["state"] == "ready" for w in router.status()["workers"]))
                    await until(lambda: bool(router.status()["workers"][1]["open_lanes"]))
                yield Ingress(router, pair, client, port, tokenizer)
        finally:
            await router.close()
            server.should_exit = True
            await task
