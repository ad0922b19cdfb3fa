"""Blocks that a one-sided writer may still be writing after a revoke: held until the fence or its death proves them.

Nobody waits: a revoke tells what is being written at that moment, and this watch asks again, soon at first, then every
MAX_PAUSE_S.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import NamedTuple

from kv_transfer.transports.base import TargetPair

FIRST_PAUSE_S = 0.001
MAX_PAUSE_S = 0.05


class _Held(NamedTuple):
    pair: TargetPair
    generation: int
    blocks: tuple[int, ...]


class Quarantine:
    """`prove` gets blocks that nothing writes any more, on the event loop, with no lock held."""

    def __init__(self, prove: Callable[[tuple[int, ...]], None]) -> None:
        self._prove = prove
        self._lock = threading.Lock()
        self._held: list[_Held] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_watching = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Comes before the first `retire`."""
        self._loop = loop

    @property
    def num_held(self) -> int:
        """Revoked generations whose window has not been seen closed."""
        return len(self._held)

    def retire(self, pair: TargetPair, generation: int, blocks: tuple[int, ...]) -> None:
        """The revoked generation goes back to the pair once it is proven, and `blocks` are told. Any thread."""
        if not blocks and pair.is_proven(generation):
            pair.release(generation)
            return
        with self._lock:
            self._held.append(_Held(pair, generation, blocks))
            is_watching, self._is_watching = self._is_watching, True
        if not is_watching and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._look, FIRST_PAUSE_S)
            except RuntimeError:
                pass  # the loop has closed: the process is ending, and its pool with it

    def _look(self, pause_s: float) -> None:
        with self._lock:
            proven = [held for held in self._held if held.pair.is_proven(held.generation)]
            self._held = [held for held in self._held if held not in proven]
            self._is_watching = bool(self._held)
        for held in proven:
            held.pair.release(held.generation)
            if held.blocks:
                self._prove(held.blocks)
        if self._is_watching and self._loop is not None:
            self._loop.call_later(pause_s, self._look, min(2 * pause_s, MAX_PAUSE_S))
