"""How a start ends: which signal asked for it, and the promise that it takes no longer than a few seconds.

A first Ctrl-C, SIGTERM or SIGHUP raises `EndRequested` in the main thread wherever it is; later ones change nothing.
From that moment a watchdog counts: when the orderly end has not finished in time, it runs the hard end and leaves the
process.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ORDERLY_END_S = 4.0


class EndRequested(KeyboardInterrupt):
    """The user or the system asked for the end. A KeyboardInterrupt, so that no `except Exception` on the way swallows
    it.
    """


class Ending:
    """Signals of one start. Construct and use in the main thread."""

    def __init__(self, hard_end: Callable[[], None]) -> None:
        self._hard_end = hard_end
        self._is_hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._had_terminal = os.isatty(sys.stdin.fileno()) if sys.stdin and not sys.stdin.closed else False
        self.reason: str | None = None

    def watch(self) -> None:
        """The signals end this start from now on. Call again after code that sets handlers of its own."""
        for number in SIGNALS:
            if number != signal.SIGHUP or not self._is_hangup_ignored:
                signal.signal(number, self._on_signal)

    def shield_children(self) -> None:
        """Processes started from now on ignore a closed terminal: they end with us, not before us. Undone by
        `watch`.
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def check_terminal(self) -> None:
        """Raises `EndRequested` when the terminal was closed while SIGHUP was ignored."""
        if self._had_terminal and not self._is_hangup_ignored and not os.isatty(sys.stdin.fileno()):
            self._request("the terminal was closed")

    def check(self) -> None:
        """Raises `EndRequested` once the end has begun: a signal may come in a place that swallows what it raises."""
        if self.reason is not None:
            raise EndRequested(self.reason)

    def begin(self, reason: str) -> None:
        """The end has begun, whether or not a signal asked for it: signals change nothing any more, the watchdog
        counts.
        """
        if self.reason is None:
            self.reason = reason
            timer = threading.Timer(ORDERLY_END_S, self._end_hard)
            timer.daemon = True
            timer.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}
        if self.reason is None:
            self._request(names[signal.Signals(number)])

    def _request(self, reason: str) -> None:
        self.begin(reason)
        raise EndRequested(reason)

    def _end_hard(self) -> None:
        try:
            self._hard_end()
        finally:
            os._exit(1)
