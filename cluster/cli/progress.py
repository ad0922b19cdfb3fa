"""Steps with elapsed time on the terminal: one line per step, rewritten while it runs; plain lines where there is no
terminal.

Writing never fails: a closed terminal must not stop the clean-up.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

TICK_S = 0.25
QUIET_LINE_S = 10.0
"""Without a terminal a running step says so this often."""


class Terminal:
    """Standard output that survives its reader."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_broken = False
        try:
            self.is_tty = self._stream.isatty()
        except ValueError:
            self.is_tty, self._is_broken = False, True

    def write(self, text: str) -> None:
        if self._is_broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._is_broken = True

    def line(self, text: str = "") -> None:
        self.write(text + "\n")


class Step:
    """One running step. `note` and `progress` may be called from any thread."""

    def __init__(self, title: str, clock: Callable[[], float]) -> None:
        self.title, self._clock = title, clock
        self._started, self._note = clock(), ""

    def note(self, text: str) -> None:
        """What the step is doing at the moment, or what came of it."""
        self._note = text

    def progress(self, stage: str, done: float) -> None:
        self._note = f"{stage} {done:.0%}" if done > 0 else stage

    def render(self) -> str:
        note = f"  {self._note}" if self._note else ""
        return f"{self.title:<28} {self._clock() - self._started:6.1f} s{note}"


class Steps:
    """The steps of one command, in order."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal, self._clock = terminal, clock

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Shows the step until the block ends; the last line stays, marked when it failed."""
        step, stop = Step(title, self._clock), threading.Event()
        ticker = threading.Thread(target=self._tick, args=(step, stop), name="progress", daemon=True)
        ticker.start()
        mark = "failed"
        try:
            yield step
            mark = "ok"
        finally:
            stop.set()
            ticker.join()
            self._show(f"  {'.' if mark == 'ok' else '!'} {step.render()}", is_last=True)

    def _tick(self, step: Step, stop: threading.Event) -> None:
        while not stop.wait(TICK_S if self._terminal.is_tty else QUIET_LINE_S):
            self._show(f"  : {step.render()}", is_last=False)

    def _show(self, text: str, is_last: bool) -> None:
        if not self._terminal.is_tty:
            self._terminal.line(text)
        else:
            self._terminal.write(f"\r\x1b[K{text[:160]}" + ("\n" if is_last else ""))
