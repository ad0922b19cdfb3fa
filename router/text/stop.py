"""Stop strings over a stream of text: nothing of a stop string leaves before it is known that it is none. Pure."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is complete first, however the text is cut into pieces.

    Of two that end at the same character the one that began first wins. With no stop strings text passes at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.is_matched = False

    def push(self, text: str) -> str:
        """The text that may leave now. After a match: what stood before the stop string, then nothing any more."""
        if self.is_matched:
            return ""
        if not self._stops:
            return text
        window = self._held + text
        found = self._first_complete(window)
        if found is not None:
            self.is_matched, self._held = True, ""
            return window[:found]
        keep = self._num_possible(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """What was held back and turned out to be text, at the end of the stream."""
        text, self._held = self._held, ""
        return text

    def _first_complete(self, window: str) -> int | None:
        matches = [(at + len(stop), at) for stop in self._stops if (at := window.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _num_possible(self, window: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(window)), longest, -1):
                if window.endswith(stop[:size]):
                    longest = size
                    break
        return longest
