"""Many short transfers over real lanes and threads, a third of them ended by either side at a random moment.

An owner of decode's blocks keeps the books: each block is free, held or quarantined, nothing is freed twice, what
arrives is what was sent, and after the storm both ends hold nothing.
"""

import asyncio
import queue
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kv_transfer.channel import Adopted, Arrived, BlocksProven, Granted, KVReceiver, KVSender, KVSource, TransferFailed
from kv_transfer.layout import KVLayout
from kv_transfer.messages import KVIdentity, TransferKey
from kv_transfer.pool import SharedPool
from kv_transfer.staging import gather_unit, view_cache
from kv_transfer.transports.select import make_transport
from kv_transfer.wire import KeyRing
from tests.support.kv_peer import make_cache

HOST = "127.0.0.1"
LAYOUT = KVLayout(4, 2, 32, 16, "fp32")
TOKENS, NUM_BLOCKS = 150, 64
BLOCKS_EACH = LAYOUT.num_blocks(TOKENS)


@dataclass
class Held:
    blocks: list[int]
    source_blocks: list[int]


class Decode:
    """The engine thread of a decode worker, reduced to its books."""

    def __init__(self, receiver: KVReceiver, source: torch.Tensor, target: torch.Tensor) -> None:
        self.receiver, self.source, self.target = receiver, source, target
        self.free = set(range(NUM_BLOCKS))
        self.held: dict[TransferKey, Held] = {}
        self.num_arrived = self.num_failed = 0

    def reserve(self, key: TransferKey, source_blocks: list[int]) -> bool:
        if len(self.free) < BLOCKS_EACH:
            return False
        blocks = [self.free.pop() for _ in range(BLOCKS_EACH)]
        self.held[key] = Held(blocks, source_blocks)
        self.receiver.expect(key, 1, [blocks], TOKENS, 0)
        return True

    def give(self, blocks: Any) -> None:
        assert not self.free & set(blocks), "freed twice"
        self.free |= set(blocks)

    def drop(self, key: TransferKey) -> None:
        held = self.held.pop(key, None)
        if held is not None:
            quarantined = self.receiver.revoke(key, "storm")
            self.give(set(held.blocks) - set(quarantined))

    def take(self, event: object) -> None:
        if isinstance(event, BlocksProven):
            self.give(event.blocks)
        elif isinstance(event, TransferFailed):
            self.num_failed += 1
            self.drop(event.key)
        elif isinstance(event, Arrived) and (held := self.held.pop(event.key, None)) is not None:
            self.num_arrived += 1
            wanted = gather_unit(view_cache(self.source), [held.source_blocks], 0, TOKENS, 0, 4)
            assert torch.equal(gather_unit(view_cache(self.target), [held.blocks], 0, TOKENS, 0, 4), wanted)
            self.give(held.blocks)


def run_storm(sender: KVSender, decode: Decode, sent: Any, received: Any, num_transfers: int, seed: int) -> None:
    dice = random.Random(seed)
    pool = list(range(NUM_BLOCKS))
    for number in range(num_transfers):
        key = TransferKey(number.to_bytes(16, "little"), 1)
        source_blocks = dice.sample(pool, BLOCKS_EACH)
        while not decode.reserve(key, source_blocks):
            decode.take(received.get(timeout=10))
        harm = dice.choice(["none", "none", "none", "none", "abort", "revoke"])
        harm_at = dice.randrange(12)
        sender.begin(key, 2, TOKENS, 0)
        step = 0
        for first in range(0, TOKENS, 50):
            for layer in range(4):
                sender.push(key, [source_blocks], first, 50, layer, 1)
                if step == harm_at and harm == "abort":
                    sender.abort(key, "storm")
                elif step == harm_at and harm == "revoke":
                    decode.drop(key)
                step += 1
        sender.finish(key, b"m")
        while not received.empty():
            decode.take(received.get())
    deadline = time.monotonic() + 20
    while len(decode.free) < NUM_BLOCKS:
        assert time.monotonic() < deadline, f"blocks are missing: {decode.held}"
        decode.take(received.get(timeout=20))
    assert all(isinstance(e, Granted | Adopted | TransferFailed) or type(e).__name__ == "PeerUp" for e in sent.queue)


@pytest.mark.parametrize(("name", "num_transfers"), [("loopback", 300), ("gloo", 300), ("shm", 300)])
def test_a_storm_of_aborted_transfers_leaks_nothing(name: Any, num_transfers: int):
    async def scenario() -> None:
        shape = (4, NUM_BLOCKS, 2, 2, 16, 32)
        pool = SharedPool() if name == "shm" else None
        source, target = torch.randn(shape), make_cache(LAYOUT, NUM_BLOCKS, pool)
        sent: queue.Queue[object] = queue.Queue()
        received: queue.Queue[object] = queue.Queue()
        transport, ring = make_transport(name, HOST, pool), KeyRing((("k", b"k" * 32),))
        offer: Any = {"host_id": "here", "transports": (name,)}
        sender = KVSender(
            identity=KVIdentity(1, "d", LAYOUT, verify="auto", **offer), ring=ring, data=source, host=HOST,
            emit=sent.put, transports={transport.name: transport},
        )  # fmt: skip
        receiver = KVReceiver(
            identity=KVIdentity(2, "d", LAYOUT, **offer), ring=ring, data=target, emit=received.put,
            transports={transport.name: transport},
        )  # fmt: skip
        port = await sender.start()
        await receiver.start()
        receiver.set_sources([KVSource(1, HOST, port)])
        await asyncio.to_thread(received.get)
        decode = Decode(receiver, source, target)
        await asyncio.to_thread(run_storm, sender, decode, sent, received, num_transfers, 7)
        assert decode.num_arrived > num_transfers // 3
        deadline = time.monotonic() + 5
        while sender._sendings or receiver._receivings:
            assert time.monotonic() < deadline, (sender._sendings, receiver._receivings)
            await asyncio.sleep(0.01)
        verdicts = [e.key for e in sent.queue if isinstance(e, Adopted | TransferFailed)]
        assert len(verdicts) == len(set(verdicts))
        assert receiver.open_sources() == {1}
        await receiver.close()
        await sender.close()
        if pool is not None:
            pool.close()
        while any(t.name.startswith("kv-") for t in threading.enumerate()):
            assert time.monotonic() < deadline + 5, "lane threads are left"
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
