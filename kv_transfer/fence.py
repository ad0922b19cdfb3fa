"""The fence between the owner of a pool and one writer: slots in shared memory, through `kv_transfer/native/fence.cpp`.

Knows addresses, generations and windows. Knows no transfer and no socket. A window names what is being written at this
moment, as `make_window` packs it; 0 is none.

    NUM_SLOTS slots of 64 bytes { generation, window }       a generation uses slot generation % NUM_SLOTS
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_SLOTS = 1024
SLOT_BYTES = 64
FENCE_BYTES = NUM_SLOTS * SLOT_BYTES
WINDOW_BYTES = 1 << 20
"""Most that is written in one window."""
COPY_FIELDS = 10
"""source target row_bytes inner outer source_inner target_inner source_outer target_outer window; see the C struct."""
LIBRARY = Path(__file__).resolve().parent / "native" / "libbaton.so"
_VERSION = 1
_IS_OPEN = 1 << 62

Copies = NDArray[np.int64]
"""`[num_copies, COPY_FIELDS]`, contiguous."""


class FenceUnavailable(Exception):
    """There is no built library here, or one of another version; the text says which and what to do."""


class Window(NamedTuple):
    """Blocks that may be written at this moment: one page of one group's block table."""

    group: int
    page: int


def make_window(group: int, page: int) -> int:
    return _IS_OPEN | group << 32 | page


def read_window(value: int) -> Window:
    return Window(value >> 32 & 0xFFFF, value & 0xFFFFFFFF)


class FenceLibrary(NamedTuple):
    """Both hold the same functions."""

    short: ctypes.PyDLL
    """Keeps the GIL: a call of nanoseconds."""
    long: ctypes.CDLL
    """Releases it."""


@functools.cache
def load_fence(path: Path = LIBRARY) -> FenceLibrary:
    """The library with its functions declared. Raises `FenceUnavailable`."""
    if not path.exists():
        raise FenceUnavailable("the fence of shared memory is not built; make native builds it")
    try:
        libraries = FenceLibrary(ctypes.PyDLL(str(path)), ctypes.CDLL(str(path)))
        libraries.short.baton_fence_version.restype = ctypes.c_int64
        version = libraries.short.baton_fence_version()
    except (OSError, AttributeError) as error:
        raise FenceUnavailable(f"{path.name} does not load: {error}") from None
    if version != _VERSION:
        raise FenceUnavailable(f"{path.name} is version {version}, not {_VERSION}; make native builds it again")
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    for library, name, result, arguments in (
        (libraries.short, "grant", None, (pointer, number)),
        (libraries.short, "revoke", number, (pointer,)),
        (libraries.short, "window", number, (pointer,)),
        (libraries.short, "enter", ctypes.c_int64, (pointer, number, number)),
        (libraries.short, "leave", None, (pointer,)),
        (libraries.long, "copy", ctypes.c_int64, (pointer, number, pointer, ctypes.c_int64, pointer, pointer)),
    ):
        function = getattr(library, f"baton_fence_{name}")
        function.restype, function.argtypes = result, arguments
    return libraries


class OwnerFence:
    """The owner's half. `grant`: one caller at a time (the receiver's lock); all else: any thread."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """`memory` holds FENCE_BYTES, zeroed, shared with the writer."""
        self._library, self._memory = load_fence(), memory
        self._used: set[int] = set()

    def _slot(self, generation: int) -> int:
        return int(self._memory.ctypes.data) + generation % NUM_SLOTS * SLOT_BYTES

    def grant(self, newer_than: int) -> int | None:
        """Opens the first generation after `newer_than` whose slot is free, and returns it; None where none is."""
        for generation in range(newer_than + 1, newer_than + 1 + NUM_SLOTS):
            if generation % NUM_SLOTS not in self._used:
                self._used.add(generation % NUM_SLOTS)
                self._library.short.baton_fence_grant(self._slot(generation), generation)
                return generation
        return None

    def revoke(self, generation: int) -> Window | None:
        """Nothing is written under this generation from now on but what the returned window names. Idempotent until
        `free`."""
        value = int(self._library.short.baton_fence_revoke(self._slot(generation)))
        return read_window(value) if value else None

    def is_clear(self, generation: int) -> bool:
        """After a revoke: whether its window has closed. True once is true for good."""
        return not self._library.short.baton_fence_window(self._slot(generation))

    def free(self, generation: int) -> None:
        """The slot may serve another generation: this one is revoked and its window was seen closed."""
        self._used.discard(generation % NUM_SLOTS)

    def revoke_all(self) -> None:
        for slot in tuple(self._used):
            self.revoke(slot)


class WriterFence:
    """The writer's half; one thread at a time per generation."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._library, self._memory = load_fence(), memory

    def _slot(self, generation: int) -> int:
        return int(self._memory.ctypes.data) + generation % NUM_SLOTS * SLOT_BYTES

    def copy(self, generation: int, copies: Copies, source: int, target: int) -> bool:
        """Performs the copies from the memory at `source` to that at `target`, in windows of WINDOW_BYTES at most.

        False when the generation was revoked: the rest is not written. Releases the GIL. Nobody checks the offsets.
        """
        assert copies.dtype == np.int64, copies.dtype
        assert copies.flags.c_contiguous
        assert copies.shape[1] == COPY_FIELDS, copies.shape
        done = self._library.long.baton_fence_copy(
            self._slot(generation), generation, copies.ctypes.data, len(copies), source, target
        )
        return bool(done)

    def enter(self, generation: int, window: int) -> bool:
        """Opens a window; False when the generation is revoked, and nothing may be written. True needs `leave`."""
        return bool(self._library.short.baton_fence_enter(self._slot(generation), generation, window))

    def leave(self, generation: int) -> None:
        self._library.short.baton_fence_leave(self._slot(generation))
