"""Memory that another process of this host may map: a decode worker's pool of blocks, and the slots of a fence.

Knows file descriptors. A memfd has no name, so nothing is left behind however its last holder ends; its size is sealed,
so that no holder can shrink it under another's feet.
"""

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory(name: str, num_bytes: int) -> tuple[int, NDArray[np.uint8]]:
    """A descriptor and the zeroed memory behind it; the caller closes the descriptor. Raises OSError.

    Pages cost memory when first written, whoever writes them; they are huge where the kernel has such for
    shared memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, map_memory(fd)
    except BaseException:
        os.close(fd)
        raise


def map_memory(fd: int) -> NDArray[np.uint8]:
    """The whole of a memfd of `make_memory`, of ours or of a peer. Raises OSError.

    The mapping lives as long as something refers to the result: nothing in use is ever unmapped.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError(f"descriptor {fd} is not sealed: its size could change while it is mapped")
    mapped = mmap.mmap(fd, os.fstat(fd).st_size)
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without huge pages: smaller ones do
    return np.frombuffer(mapped, np.uint8)


class SharedPool:
    """The memory of one cache, to be passed to writers. Made once, kept to the end of the process."""

    def __init__(self) -> None:
        self.fd = -1
        self.memory = np.zeros(0, np.uint8)

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """The zeroed memory of the cache; call once. Raises OSError."""
        assert self.fd == -1, "a pool holds one cache"
        self.fd, self.memory = make_memory("baton-kv-pool", num_bytes)
        return self.memory

    def close(self) -> None:
        """No further writer can be let in; the memory stays while somebody refers to it. Idempotent."""
        if self.fd != -1:
            os.close(self.fd)
            self.fd = -1
