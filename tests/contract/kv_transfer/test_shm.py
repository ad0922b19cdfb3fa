"""The one-sided pair over shared memory: who is let in, what a fence lets through, and what proves it."""

import contextlib
import gc
import mmap
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kv_transfer.errors import DeadlineExceeded, PeerLost
from kv_transfer.fence import COPY_FIELDS, NUM_SLOTS, WINDOW_BYTES, Window, make_window
from kv_transfer.lane import BlobExchange
from kv_transfer.pool import SharedPool, make_memory, map_memory
from kv_transfer.transports import shm
from kv_transfer.transports.shm import ShmTarget, ShmTransport, ShmWriter

POOL_BYTES = 8 << 20


class Ends:
    """Both transports of one host, in threads of this process."""

    def __init__(self) -> None:
        self.pool = SharedPool()
        self.memory = self.pool.allocate(POOL_BYTES)
        self.receiving, self.sending = ShmTransport(self.pool), ShmTransport()
        self.blobs: list[bytes] = []

    def open(self, tamper: bool = False) -> tuple[ShmTarget, ShmWriter]:
        exchanges: list[BlobExchange] = []

        def put(into: int, blob: bytes) -> None:
            self.blobs.append(blob)
            exchanges[into].feed(bytes([blob[0] ^ tamper]) + blob[1:])

        exchanges += [BlobExchange(lambda blob: put(1, blob)), BlobExchange(lambda blob: put(0, blob))]
        opened: dict[int, object] = {}

        def open_end(rank: int, transport: ShmTransport) -> None:
            try:
                opened[rank] = transport.open(rank, b"lane-one", exchanges[rank])
            except Exception as error:
                opened[rank] = error
                exchanges[1 - rank].fail()

        threads = [threading.Thread(target=open_end, args=args) for args in ((0, self.receiving), (1, self.sending))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        for rank in (0, 1):
            if isinstance(opened[rank], Exception):
                raise opened[rank]
        target, writer = opened[0], opened[1]
        assert isinstance(target, ShmTarget)
        assert isinstance(writer, ShmWriter)
        return target, writer


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.pool.close()


def one_copy(num_bytes: int, target: int = 0, page: int = 0) -> np.ndarray:
    copies = np.zeros((1, COPY_FIELDS), np.int64)
    copies[0] = (0, target, num_bytes, 1, 1, 0, 0, 0, 0, make_window(0, page))
    return copies


def payload(num_bytes: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_copy_under_a_grant_lies_in_the_receivers_own_memory(ends: Ends):
    target, writer = ends.open()
    generation = target.grant(41)
    assert generation == 42
    sent = payload(3 << 20)
    assert writer.copy(generation, one_copy(3 << 20, target=5), sent)
    assert np.array_equal(ends.memory[5 : 5 + (3 << 20)], sent.numpy())
    assert not ends.memory[:5].any()
    assert not ends.memory[5 + (3 << 20) :].any()
    with writer.window(generation, make_window(0, 0)) as is_open:
        assert is_open
        writer.pool[:5].fill_(9)
    assert ends.memory[:5].tolist() == [9] * 5


def test_nothing_is_written_after_a_revoke_or_under_another_generation(ends: Ends):
    target, writer = ends.open()
    first, second = target.grant(0), target.grant(1)
    assert (first, second) == (1, 2)
    assert target.revoke(first) is None
    for generation in (first, first + NUM_SLOTS, second + NUM_SLOTS, 3):
        assert not writer.copy(generation, one_copy(4096), payload(4096))
        with writer.window(generation, make_window(0, 0)) as is_open:
            assert not is_open
    assert not ends.memory.any()
    assert writer.copy(second, one_copy(4096), payload(4096)), "the other transfer on the lane is untouched"
    assert target.is_proven(first)
    target.release(first)
    target.poison()
    assert not writer.copy(second, one_copy(4096), payload(4096, 2))


def test_a_revoke_names_the_window_that_is_open_and_its_end_is_the_proof(ends: Ends):
    target, writer = ends.open()
    generation = target.grant(0)
    with writer.window(generation, make_window(3, 77)):
        assert target.revoke(generation) == Window(3, 77)
        assert target.revoke(generation) == Window(3, 77)
        assert not target.is_proven(generation)
        target.release(generation)
        assert target.grant(generation + NUM_SLOTS - 1) == generation + NUM_SLOTS + 1, "its slot is still in use"
    assert target.is_proven(generation)
    target.release(generation)
    assert target.grant(generation + 2 * NUM_SLOTS - 1) == generation + 2 * NUM_SLOTS


def test_slots_run_out_and_come_back(ends: Ends):
    target, _ = ends.open()
    newest = 0
    for _ in range(NUM_SLOTS):
        newest = target.grant(newest) or 0
    assert newest == NUM_SLOTS
    assert target.grant(newest) is None
    target.revoke(7)
    target.release(7)
    assert target.grant(newest) == NUM_SLOTS + 7


def test_a_large_copy_is_cut_into_windows_so_that_a_revoke_stops_it(ends: Ends):
    """The revoke comes from another thread while the copy runs: what is written is a whole number of windows."""
    target, writer = ends.open()
    sent = payload(POOL_BYTES)
    stopped = 0
    for generation in range(1, 200):
        assert target.grant(generation - 1) == generation
        ends.memory[:] = 0
        done: list[bool] = []
        thread = threading.Thread(
            target=lambda g=generation, d=done: d.append(writer.copy(g, one_copy(POOL_BYTES), sent))
        )
        thread.start()
        while not ends.memory[0]:
            pass
        target.revoke(generation)
        thread.join(5)
        assert target.is_proven(generation)
        target.release(generation)
        if not done[0]:
            written = int(np.flatnonzero(ends.memory)[-1]) + 1
            assert written % WINDOW_BYTES == 0
            assert written < POOL_BYTES
            stopped += 1
            if stopped == 3:
                return
    raise AssertionError("no copy was caught under way")


def test_a_poisoned_writer_raises_and_its_memory_stays_mapped(ends: Ends):
    target, writer = ends.open()
    generation = target.grant(0)
    writer.poison()
    writer.poison()
    with pytest.raises(PeerLost):
        writer.copy(generation, one_copy(64), payload(64))
    with pytest.raises(PeerLost), writer.window(generation, make_window(0, 0)):
        pass
    assert int(writer.pool.sum()) == 0


# --- who is let in --------------------------------------------------------------------------------------------------


def test_a_peer_with_another_secret_gets_nothing(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shm, "OPEN_TIMEOUT_S", 0.5)
    with pytest.raises((PeerLost, DeadlineExceeded)):
        ends.open(tamper=True)


def test_strangers_are_turned_away_and_the_peer_still_comes_in(ends: Ends):
    """A stranger who learned the address connects first, silent or with a wrong secret: it gets no descriptor."""
    strangers: list[socket.socket] = []
    real = BlobExchange.feed

    def feed(self: BlobExchange, blob: bytes) -> None:
        if len(blob) > shm.SECRET_BYTES and not strangers:
            for text in (b"", b"x" * shm.SECRET_BYTES):
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stranger.connect(blob[shm.SECRET_BYTES :].decode())
                stranger.sendall(text)
                strangers.append(stranger)
        real(self, blob)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlobExchange, "feed", feed)
        target, writer = ends.open()
    assert writer.copy(target.grant(0) or 0, one_copy(64), payload(64))
    for stranger in strangers:
        stranger.settimeout(2)
        with contextlib.suppress(ConnectionResetError):
            data, fds, _, _ = socket.recv_fds(stranger, 64, 4)
            assert (data, fds) == (b"", [])
        stranger.close()


def test_nobody_listens_once_a_pair_is_open_and_no_descriptor_is_left(ends: Ends):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pairs = [ends.open() for _ in range(5)]
    with open("/proc/net/unix") as listing:
        assert "baton-kv-" not in listing.read()
    # the fence twice and the pool once (mmap keeps one each), and the pidfd
    assert len(os.listdir("/proc/self/fd")) <= before + 4 * len(pairs)
    del pairs
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir("/dev/shm") if "baton" in name]


def test_memory_that_could_shrink_is_not_mapped():
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    with pytest.raises(OSError, match="not sealed"):
        map_memory(fd)
    os.close(fd)
    fd, memory = make_memory("sealed", 4096)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)
    os.close(fd)
    assert memory.nbytes == mmap.PAGESIZE


# --- a writer in another process ------------------------------------------------------------------------------------


def hold_window(connection: "multiprocessing.connection.Connection", blob: bytes, generation: int) -> None:
    exchange = BlobExchange(connection.send_bytes)
    exchange.feed(blob)
    writer = ShmTransport().open(1, b"lane-one", exchange)
    assert isinstance(writer, ShmWriter)
    while True:
        with writer.window(generation, make_window(0, 5)) as is_open:
            if is_open:
                connection.send_bytes(b"inside")
                time.sleep(60)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_that_dies_inside_its_window_is_proven_by_its_death(ends: Ends, ending: int):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arrived = threading.Event()
    exchange = BlobExchange(lambda blob: (processes.append(start(blob)), arrived.set()))
    processes: list[multiprocessing.Process] = []

    def start(blob: bytes) -> multiprocessing.Process:
        process = context.Process(target=hold_window, args=(there, blob, 1))
        process.start()
        threading.Thread(target=lambda: exchange.feed(here.recv_bytes()), daemon=True).start()
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "OPEN_TIMEOUT_S", 60.0)
        target = ends.receiving.open(0, b"lane-one", exchange)
    assert isinstance(target, ShmTarget)
    (process,) = processes
    assert target.grant(0) == 1
    assert here.poll(30)
    assert here.recv_bytes() == b"inside"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert target.revoke(1) == Window(0, 5)
    assert not target.is_proven(1)
    assert time.monotonic() - started < 0.1, "a revoke waits for nobody"
    os.kill(process.pid, signal.SIGCONT)
    assert not target.is_proven(1)
    os.kill(process.pid, ending)
    process.join(10)
    assert target.is_proven(1)
    target.release(1)
    assert target.grant(NUM_SLOTS) != NUM_SLOTS + 1, "the slot of a dead writer's window stays out of use"
