"""What each ingress hears of this worker's prefix cache: CACHE frames. Pure; called on the engine thread.

An ingress that is new, or whose frames were dropped, gets everything first; from then on it gets changes.
"""

from collections.abc import Iterable, Iterator, Sequence

from workers.engine.prefix_cache import PrefixCache
from workers.protocol import MAX_NAMES, Cache

PERIOD_S = 0.25
MAX_FRAMES = 128
"""Frames that tell everything; names beyond them (over 131,072 blocks) are left out."""


class PrefixNews:
    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self._told: set[int] = set()
        self._last = float("-inf")

    def start_over(self, ingress: int) -> None:
        """What this ingress knows is void: it hears everything next."""
        self._told.discard(ingress)

    def take(self, ingresses: Iterable[int], now: float) -> dict[int, list[Cache]]:
        """The frames due now, by ingress; nothing within PERIOD_S of the last ones."""
        if now - self._last < PERIOD_S:
            return {}
        self._last = now
        added, removed = self._prefixes.take_changes()
        changes = list(_frames(added, removed, is_whole=False)) if added or removed else []
        wanted = set(ingresses)
        new = wanted - self._told
        whole = list(_frames(self._prefixes.published()[-MAX_NAMES * MAX_FRAMES :], (), is_whole=True)) if new else []
        self._told = wanted
        return {ingress: frames for ingress in wanted if (frames := whole if ingress in new else changes)}


def _frames(added: Sequence[bytes], removed: Sequence[bytes], *, is_whole: bool) -> Iterator[Cache]:
    """At least one frame; removals go first, so that a receiver never holds more than there is."""
    for first in range(0, max(len(added), len(removed), 1), MAX_NAMES):
        window = slice(first, first + MAX_NAMES)
        yield Cache(is_whole and not first, b"".join(added[window]), b"".join(removed[window]))
