"""What every runner speaks: one JSON object a line, requests on stdin, answers on stdout. Standard library only.

    {"do": "load", ...}                          -> {"version", "load_s", ...facts}
    {"do": "generate", "prompts", "new_tokens"}  -> Timing
    {"do": NAME, ...}                            -> whatever the method `do_NAME` of the engine returns
    {"do": "quit"}                               -> ends

A failure answers {"error": reason} and the runner goes on. What the engine's library prints goes to stderr.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

_PR_SET_PDEATHSIG = 1


class Timing(NamedTuple):
    """One run of a batch of prompts that arrive together, greedy, no end of sequence."""

    first_s: float
    """From the first request until the last stream has its first token."""
    decode_s: float
    """From then to the end."""
    decoded: int
    """Tokens of all streams that came in `decode_s`."""
    head: list[int]
    """The first tokens of the first stream: the engines agree on most of them, or one is broken."""


class Engine(Protocol):
    def load(self, **settings: Any) -> dict[str, Any]:
        """Ready to generate; facts about it, its version among them."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing: ...


class Watch:
    """Collects tokens as they come and makes the `Timing`."""

    def __init__(self, num_streams: int) -> None:
        self._started = time.perf_counter()
        self._without_first = set(range(num_streams))
        self._first_at = 0.0
        self._decoded = 0
        self._head: list[int] = []

    def saw(self, stream: int, tokens: Sequence[int]) -> None:
        """Call once per step and stream, with all tokens of a step before the next step runs."""
        if self._without_first:
            self._without_first.discard(stream)
            if not self._without_first:
                self._first_at = time.perf_counter()
        else:
            self._decoded += len(tokens)
        if stream == 0 and len(self._head) < 8:
            self._head += map(int, tokens)

    def done(self) -> Timing:
        now = time.perf_counter()
        return Timing(self._first_at - self._started, now - self._first_at, self._decoded, self._head)


def serve(engine: Engine) -> None:
    """Answer until stdin ends or the parent dies, even one that cannot say so."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library that prints does not speak for us
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "quit":
            break
        try:
            answer = _answer(engine, what, request)
        except Exception as error:  # the process edge: the bench reports the reason
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # some engines hang or crash in their destructors


def _answer(engine: Engine, what: str, request: dict[str, Any]) -> dict[str, Any]:
    if what == "load":
        started = time.perf_counter()
        facts = engine.load(**request)
        return {**facts, "load_s": time.perf_counter() - started}
    if what == "generate":
        return engine.generate(**request)._asdict()
    return dict(getattr(engine, f"do_{what}")(**request))
