"""A writer in a process of its own that is always late: `python -m tests.support.late_writer ADDRESS`.

It opens the sending end of a pair of shared memory, then writes every block of the pool with the number of the current
round, again and again, whether or not the owner has moved on. Without a fence it looks at the generation first, and
then copies: what a writer does that was told to check, and not how.
"""

import sys
from multiprocessing.connection import Client, Connection
from typing import Literal

import numpy as np
import torch

from kv_transfer.copies import CacheShape, Part, plan_copies
from kv_transfer.fence import NUM_SLOTS, SLOT_BYTES, Copies
from kv_transfer.lane import BlobExchange
from kv_transfer.layout import KVLayout
from kv_transfer.transports import shm
from kv_transfer.transports.shm import ShmTransport, ShmWriter

LAYOUT = KVLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_tokens=1024, dtype="bf16")
"""Blocks of 512 KiB, two of them a window."""
NUM_BLOCKS = 8
FENCE_KEY = b"late writer"
Mode = Literal["fence", "check"]


def plan() -> Copies:
    shape, table = CacheShape(LAYOUT, NUM_BLOCKS), [list(range(NUM_BLOCKS))]
    return plan_copies(shape, table, shape, table, Part(0, NUM_BLOCKS * LAYOUT.block_tokens, 0, 1))


def open_writer(connection: Connection) -> ShmWriter:
    shm.OPEN_TIMEOUT_S = 60.0
    exchange = BlobExchange(connection.send_bytes)
    exchange.feed(connection.recv_bytes())
    writer = ShmTransport().open(1, b"lane-one", exchange)
    assert isinstance(writer, ShmWriter)
    return writer


def write_for_ever(writer: ShmWriter, mode: Mode) -> None:
    """Never returns. A generation is taken from the fence itself, as nothing else is as quick."""
    copies = plan()
    source = torch.empty(CacheShape(LAYOUT, NUM_BLOCKS).num_bytes, dtype=torch.uint8)
    slots = writer._fence._memory.view(np.uint64).reshape(NUM_SLOTS, SLOT_BYTES // 8)
    have, into, done = source.numpy(), writer.pool.numpy(), 0
    while True:
        generation = int(slots[:, 0].max())
        if generation <= done:
            continue
        have[:] = generation % 251 + 1
        if mode == "fence":
            writer.copy(generation, copies, source)
        else:
            for start, size in copies[:, [1, 2]].tolist():
                if int(slots[generation % NUM_SLOTS, 0]) != generation:
                    break
                into[start : start + size] = have[start : start + size]
        done = generation


def main() -> None:
    torch.set_num_threads(1)
    address, mode = sys.argv[1], sys.argv[2]
    with Client(address, authkey=FENCE_KEY) as connection:
        writer = open_writer(connection)
        assert mode in ("fence", "check")
        write_for_ever(writer, "fence" if mode == "fence" else "check")


if __name__ == "__main__":
    main()
