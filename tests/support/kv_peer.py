"""One end of a channel in a process of its own: `python -m tests.support.kv_peer ROLE JSON`.

Speaks JSON lines: commands on stdin, events and answers on stdout. The cache content of a prompt is a function of
(seed, token, layer), so either end checks it without having seen the other's memory.
"""

import asyncio
import dataclasses
import json
import math
import sys
import threading
from typing import Any

import torch

from kv_transfer.channel import Adopted, Arrived, BlocksProven, KVReceiver, KVSender, KVSource
from kv_transfer.layout import KVLayout, plan_units
from kv_transfer.messages import KVIdentity
from kv_transfer.pool import SharedPool
from kv_transfer.staging import gather_unit, scatter_unit, view_cache
from kv_transfer.transports import gloo
from kv_transfer.transports.select import make_transport
from kv_transfer.wire import KeyRing

HOST = "127.0.0.1"


def content(seed: int, num_tokens: int, layout: KVLayout) -> torch.Tensor:
    """`[layers, 2, heads, num_tokens, dim]` of small integers, exact in bf16 too."""
    shape = (layout.num_layers, 2, layout.num_kv_heads, num_tokens, layout.head_dim)
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).reshape(shape)
    return ((numbers * 31 + seed * 7) % 251 - 125).to(torch.float32)


def make_cache(layout: KVLayout, num_blocks: int, pool: SharedPool | None = None) -> torch.Tensor:
    """A zeroed cache, in `pool` where one is given."""
    dtype = torch.float32 if layout.dtype == "fp32" else torch.bfloat16
    shape = layout.cache_shape(num_blocks)
    if pool is None:
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(pool.allocate(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)


def fill(data: torch.Tensor, blocks: list[int], unit: torch.Tensor) -> None:
    scatter_unit(view_cache(data), [blocks], unit, 0, 0)


def is_content(data: torch.Tensor, blocks: list[int], unit: torch.Tensor) -> bool:
    layers, _, _, tokens, _ = unit.shape
    return torch.equal(gather_unit(view_cache(data), [blocks], 0, tokens, 0, layers).to(torch.float32), unit)


class Peer:
    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        self.layout = KVLayout(**settings["layout"])
        name = settings["transport"]
        pool = SharedPool() if name == "shm" and role == "receiver" else None
        self.data = make_cache(self.layout, settings["num_blocks"], pool)
        identity = KVIdentity(
            settings["incarnation"], settings.get("digest", "d"), self.layout, host_id="here", transports=(name,),
            verify=settings.get("verify", "full"),
        )  # fmt: skip
        ring = KeyRing((("k", bytes.fromhex(settings.get("secret", "00" * 32))),))
        transports = {name: make_transport(name, HOST, pool)}
        self.sender: KVSender | None = None
        self.receiver: KVReceiver | None = None
        if role == "sender":
            self.sender = KVSender(
                identity=identity, ring=ring, data=self.data, host=HOST, emit=self.emit, transports=transports
            )
        else:
            self.receiver = KVReceiver(
                identity=identity, ring=ring, data=self.data, emit=self.emit, transports=transports
            )

    def tell(self, **fields: object) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    def emit(self, event: Any) -> None:
        fields: dict[str, object] = {"event": type(event).__name__}
        if hasattr(event, "key"):
            fields["key"] = event.key.attempt
        if hasattr(event, "reason"):
            fields["reason"] = event.reason
        if hasattr(event, "incarnation"):
            fields["incarnation"] = event.incarnation
        if isinstance(event, BlocksProven):
            fields["blocks"] = event.blocks
        if isinstance(event, Adopted | Arrived):
            fields["units"] = len(event.trace.units)
        if isinstance(event, Arrived):
            fields["meta"] = event.meta.decode()
        self.tell(**fields)

    async def run(self, port: int) -> None:
        if self.sender is not None:
            port = await self.sender.start(port)
        if self.receiver is not None:
            await self.receiver.start()
        self.tell(event="Started", port=port)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            command = json.loads(line)
            name = command.pop("do")
            if name == "close":
                break
            answer = await asyncio.to_thread(getattr(self, f"do_{name}"), **command)
            self.tell(event="Answer", value=answer)
        for end in (self.sender, self.receiver):
            if end is not None:
                await end.close()

    def do_sources(self, sources: list[list[Any]]) -> None:
        assert self.receiver is not None
        self.receiver.set_sources([KVSource(incarnation, HOST, port) for incarnation, port in sources])

    def do_expect(self, key: int, source: int, blocks: list[int], tokens: int) -> None:
        assert self.receiver is not None
        self.receiver.expect((b"s" * 16, key), source, [blocks], tokens, 0)

    def do_check(self, blocks: list[int], tokens: int, seed: int) -> bool:
        return is_content(self.data, blocks, content(seed, tokens, self.layout))

    def do_revoke(self, key: int) -> list[int]:
        assert self.receiver is not None
        return list(self.receiver.revoke((b"s" * 16, key), "test"))

    def do_ship(
        self, key: int, peer: int, blocks: list[int], tokens: int, seed: int, chunk: int, unit_bytes: int
    ) -> None:
        """Fills the blocks and pushes the prompt in chunks."""
        assert self.sender is not None
        fill(self.data, blocks, content(seed, tokens, self.layout))
        self.sender.begin((b"s" * 16, key), peer, tokens, 0)
        for first in range(0, tokens, chunk):
            count = min(chunk, tokens - first)
            for first_layer, num_layers in plan_units(count, self.layout, unit_bytes):
                self.sender.push((b"s" * 16, key), [blocks], first, count, first_layer, num_layers)
        self.sender.finish((b"s" * 16, key), b"meta")

    def do_abort(self, key: int) -> None:
        assert self.sender is not None
        self.sender.abort((b"s" * 16, key), "test")

    def do_facts(self) -> dict[str, object]:
        end: Any = self.sender or self.receiver
        links = list(end._links.values())
        return {
            "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("kv-")),
            "transfers": len(end._sendings if self.sender else end._receivings),
            "open": sorted(end.open_peers() if self.sender else end.open_sources()),
            "in_flight": sum(link.lane.num_in_flight for link in links if link.lane is not None),
        }


def main() -> None:
    torch.set_num_threads(1)
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    gloo.STUCK_TIMEOUT_S = settings.get("stuck_s", gloo.STUCK_TIMEOUT_S)
    settings["layout"] = dataclasses.asdict(KVLayout(**settings["layout"]))
    asyncio.run(Peer(role, settings).run(settings.get("port", 0)))


if __name__ == "__main__":
    main()
