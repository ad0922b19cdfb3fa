"""Both ends of a channel in one process, on an event loop of their own: what acceptance lines drive by thousands.

Decode's blocks are kept in books: each is free, held or quarantined, and none is freed twice.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import torch

from kv_transfer.channel import BlocksProven, KVReceiver, KVSender, KVSource
from kv_transfer.layout import KVLayout
from kv_transfer.messages import KVIdentity, TransferKey
from kv_transfer.pool import SharedPool
from kv_transfer.staging import gather_unit, view_cache
from kv_transfer.transports.select import make_transport
from kv_transfer.wire import KeyRing
from tests.support.kv_peer import make_cache

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


class Books:
    """Whose decode's blocks are."""

    def __init__(self, num_blocks: int) -> None:
        self.free = set(range(num_blocks))
        self.quarantined: set[int] = set()
        self.num_blocks = num_blocks

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give(self, blocks: list[int], quarantined: tuple[int, ...] = ()) -> None:
        assert not self.free & set(blocks), "freed twice"
        self.quarantined |= set(quarantined)
        self.free |= set(blocks) - set(quarantined)

    def prove(self, blocks: tuple[int, ...]) -> None:
        assert set(blocks) <= self.quarantined, "proven without a quarantine"
        self.quarantined -= set(blocks)
        self.free |= set(blocks)


class KVChannel:
    """An open channel over one transport; the caches of both ends have `layout`, and digests travel where they help."""

    def __init__(self, name: Any, layout: KVLayout, num_blocks: int) -> None:
        self.layout, self.books = layout, Books(num_blocks)
        self.pool = SharedPool() if name == "shm" else None
        self.source = torch.randn(layout.cache_shape(num_blocks), generator=torch.Generator().manual_seed(1))
        self.target = make_cache(layout, num_blocks, self.pool)
        self.sent: queue.Queue[Any] = queue.Queue()
        self.received: queue.Queue[Any] = queue.Queue()
        offer: Any = {"host_id": "here", "transports": (name,), "verify": "auto"}
        ring, transports = KeyRing((("k", b"k" * 32),)), {name: make_transport(name, HOST, self.pool)}
        self.sender = KVSender(
            identity=KVIdentity(1, "d", layout, **offer), ring=ring, data=self.source, host=HOST, emit=self.sent.put,
            transports=transports,
        )  # fmt: skip
        self.receiver = KVReceiver(
            identity=KVIdentity(2, "d", layout, **offer), ring=ring, data=self.target, emit=self.received.put,
            transports=transports,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def open(self) -> None:
        self._thread.start()
        port = self.run(self.sender.start())
        self.run(self.receiver.start())
        self.receiver.set_sources([KVSource(1, HOST, port)])
        self.wait(lambda: self.receiver.open_sources() == {1} and self.sender.open_peers() == (2,), "open")

    def close(self) -> None:
        self.run(self.receiver.close())
        self.run(self.sender.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()
        if self.pool is not None:
            self.pool.close()

    def wait(self, condition: Any, what: str, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
            time.sleep(0.0005)

    def wait_idle(self) -> None:
        """Both ends have forgotten every transfer and every block is free; takes decode's events on the way."""
        self.wait(self._is_idle, "idle")

    def _is_idle(self) -> bool:
        while not self.received.empty():
            event = self.received.get()
            if isinstance(event, BlocksProven):
                self.books.prove(event.blocks)
        is_forgotten = not self.sender._sendings and not self.receiver._receivings
        return is_forgotten and len(self.books.free) == self.books.num_blocks

    def get(self, kind: type, key: TransferKey, events: "queue.Queue[Any]") -> Any:
        """The next event of this kind and transfer; proofs are booked, others are dropped."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            event = events.get(timeout=max(0.001, deadline - time.monotonic()))
            if isinstance(event, BlocksProven):
                self.books.prove(event.blocks)
            elif isinstance(event, kind) and getattr(event, "key", None) == key:
                return event

    def is_equal(self, source_blocks: list[int], blocks: list[int], num_tokens: int) -> bool:
        layers = self.layout.num_layers
        wanted = gather_unit(view_cache(self.source), [source_blocks], 0, num_tokens, 0, layers)
        return torch.equal(gather_unit(view_cache(self.target), [blocks], 0, num_tokens, 0, layers), wanted)


@contextlib.contextmanager
def open_channel(name: str, layout: KVLayout, num_blocks: int) -> Iterator[KVChannel]:
    """At the end both ends hold nothing and no thread of theirs is left."""
    channel = KVChannel(name, layout, num_blocks)
    channel.open()
    try:
        yield channel
        channel.wait_idle()
    finally:
        channel.close()
    channel.wait(lambda: not any(t.name.startswith("kv-") for t in threading.enumerate()), "threads ended")
