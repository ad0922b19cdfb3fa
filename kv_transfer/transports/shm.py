"""Shared memory between two workers of one host: the sender writes into the receiver's pool, one copy, under a fence.

Knows descriptors, unix sockets and the fence. Knows no transfer: generations and copies are its owners' business.

    open   receiver (rank 0)                                      sender (rank 1)
           listens on a random abstract name   -- blob: name, secret -->
                                               <-- blob: secret --
           accepts; same user?                 <-- secret of the receiver's blob   connects; same user?
           opens a pidfd of the sender         -- pool and fence, secret of the sender's blob -->
                                               <-- b"mapped" --  (alive after the pidfd was taken)

Nothing listens afterwards and nothing has a name: the memory goes with its last holder. The fence (`fence.py`) is what
proves that nobody writes any more; exit of the writer, told by the pidfd, proves it too.
"""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from kv_transfer.errors import PeerLost, TransferError
from kv_transfer.fence import FENCE_BYTES, Copies, FenceUnavailable, OwnerFence, Window, WriterFence, load_fence
from kv_transfer.pool import SharedPool, make_memory, map_memory
from kv_transfer.transports.base import OPEN_TIMEOUT_S, Exchange

SECRET_BYTES = 32
_MAPPED = b"mapped"


def find_fault() -> str:
    """Why this process cannot use shared memory; empty where it can."""
    if not all(hasattr(os, name) for name in ("memfd_create", "pidfd_open")):
        return "this system has no memfd or pidfd"
    try:
        load_fence()
    except FenceUnavailable as error:
        return str(error)
    return ""


def find_host_id() -> str:
    """Equal for two processes that can pass each other descriptors and see each other die; "" where nothing tells."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid", "user")]
            return "/".join([boot.read().strip(), *spaces, str(os.getuid())])
    except OSError:
        return ""


class ShmTarget:
    """The receiver's end: grants and revokes. See `base.TargetPair`."""

    def __init__(self, fence: OwnerFence, writer: int) -> None:
        """`writer` is a pidfd of the only process that can write; it is closed with this object."""
        self._fence, self._writer = fence, writer

    def __del__(self) -> None:
        os.close(self._writer)

    def grant(self, newer_than: int) -> int | None:
        """Opens the first generation after `newer_than` that the fence has room for, and returns it; None: no room."""
        return self._fence.grant(newer_than)

    def revoke(self, generation: int) -> Window | None:
        """Nothing is written under this generation from now on, but what the returned window names. Idempotent."""
        return self._fence.revoke(generation)

    def is_proven(self, generation: int) -> bool:
        """After `revoke`: whether nothing writes any more, because the window has closed or the writer is dead."""
        return self._fence.is_clear(generation) or bool(select.select([self._writer], [], [], 0)[0])

    def release(self, generation: int) -> None:
        """The generation is proven and forgotten."""
        if self._fence.is_clear(generation):  # a dead writer's window never closes: its slot stays out of use
            self._fence.free(generation)

    def poison(self) -> None:
        """Every generation is revoked. What a window still names is proven as after any revoke."""
        self._fence.revoke_all()


class ShmWriter:
    """The sender's end: a mapping of the receiver's pool, written to under the fence."""

    def __init__(self, fence: WriterFence, pool: NDArray[np.uint8]) -> None:
        self.pool = torch.from_numpy(pool)
        """The receiver's whole pool, flat uint8."""
        self._fence = fence
        self._is_broken = False

    def copy(self, generation: int, copies: Copies, source: torch.Tensor) -> bool:
        """Copies from `source`'s memory; False when the generation is revoked. Raises `PeerLost` once poisoned.

        One thread at a time per generation. Offsets are the caller's to check.
        """
        if self._is_broken:
            raise PeerLost("the pair of shared memory is closed")
        return self._fence.copy(generation, copies, source.data_ptr(), self.pool.data_ptr())

    @contextlib.contextmanager
    def window(self, generation: int, window: int) -> Iterator[bool]:
        """Opens a window for a write of at most WINDOW_BYTES into `pool`; yields False when nothing may be written."""
        if self._is_broken:
            raise PeerLost("the pair of shared memory is closed")
        is_open = self._fence.enter(generation, window)
        try:
            yield is_open
        finally:
            if is_open:
                self._fence.leave(generation)

    def poison(self) -> None:
        """Later writes raise; one that is under way ends by itself. The mapping goes with its last user."""
        self._is_broken = True


class ShmTransport:
    """`pool` is what writers are let into: decode's cache. A prefill worker has none."""

    name = "shm"

    def __init__(self, pool: SharedPool | None = None) -> None:
        load_fence()
        self._pool = pool

    def renew(self) -> None:
        """Each pair has a random name of its own: a stranger on one costs the next nothing."""

    def open(self, rank: int, lane: bytes, exchange: Exchange) -> ShmTarget | ShmWriter:
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        try:
            return self._open_target(exchange, deadline) if rank == 0 else _open_writer(exchange, deadline)
        except OSError as error:
            raise PeerLost(f"the pair of shared memory did not open ({type(error).__name__}: {error})") from None

    def _open_target(self, exchange: Exchange, deadline: float) -> ShmTarget:
        assert self._pool is not None, "decode has a pool to let writers into"
        ours = secrets.token_bytes(SECRET_BYTES)
        name = f"\0baton-kv-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(name)
            listener.listen(8)
            exchange.put(ours + name.encode())
            theirs = exchange.get(OPEN_TIMEOUT_S)
            with _accept(listener, ours, deadline) as peer:
                return self._admit(peer, theirs)

    def _admit(self, peer: socket.socket, secret: bytes) -> ShmTarget:
        assert self._pool is not None
        pid, _ = _credentials(peer)
        writer = os.pidfd_open(pid)
        try:
            fd, memory = make_memory("baton-kv-fence", FENCE_BYTES)
            try:
                socket.send_fds(peer, [secret], [self._pool.fd, fd])
            finally:
                os.close(fd)
            if _receive(peer, len(_MAPPED)) != _MAPPED:
                raise PeerLost("the peer did not map the pool")
            return ShmTarget(OwnerFence(memory), writer)
        except BaseException:
            os.close(writer)
            raise


def _accept(listener: socket.socket, secret: bytes, deadline: float) -> socket.socket:
    """The connection of who runs as our user and knows the secret; strangers are turned away until the deadline."""
    while (remaining := deadline - time.monotonic()) > 0:
        listener.settimeout(remaining)
        peer, _ = listener.accept()
        peer.settimeout(min(1.0, remaining))
        try:
            if _credentials(peer)[1] == os.getuid() and hmac.compare_digest(_receive(peer, SECRET_BYTES), secret):
                return peer
        except (OSError, TransferError):
            pass  # a stranger, or a peer that ended: the next one may be ours
        peer.close()
    raise PeerLost("no peer came for the pair of shared memory")


def _open_writer(exchange: Exchange, deadline: float) -> ShmWriter:
    ours = secrets.token_bytes(SECRET_BYTES)
    exchange.put(ours)
    blob = exchange.get(OPEN_TIMEOUT_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(max(0.01, deadline - time.monotonic()))
        peer.connect(blob[SECRET_BYTES:].decode())
        if _credentials(peer)[1] != os.getuid():
            raise PeerLost("another user listens at the address of the pair")
        peer.sendall(blob[:SECRET_BYTES])
        answer, fds, _, _ = socket.recv_fds(peer, SECRET_BYTES, 2)
        try:
            if not hmac.compare_digest(answer, ours) or len(fds) != 2:
                raise PeerLost("who listens at the address of the pair is not the lane's peer")
            pool, fence = map_memory(fds[0]), map_memory(fds[1])
        finally:
            for fd in fds:
                os.close(fd)
        if fence.nbytes != FENCE_BYTES:
            raise PeerLost(f"a fence has {FENCE_BYTES} bytes, the peer's {fence.nbytes}")
        peer.sendall(_MAPPED)
    return ShmWriter(WriterFence(fence), pool)


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel tells them."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def _receive(peer: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = peer.recv(num_bytes - len(received))
        if not part:
            raise PeerLost("the peer ended while the pair opened")
        received += part
    return received
