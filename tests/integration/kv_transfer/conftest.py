"""Two real processes and the tools to hurt them. Whatever a test did, both ends are idle at its end or dead."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = {"num_layers": 6, "num_kv_heads": 2, "head_dim": 64, "block_tokens": 16, "dtype": "fp32"}


class PeerProcess:
    """A `tests.support.kv_peer` process; commands are answered, events are collected."""

    def __init__(self, role: str, **settings: Any) -> None:
        settings = {"layout": LAYOUT, "num_blocks": 256, "transport": "gloo", **settings}
        self.incarnation: int = settings["incarnation"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kv_peer", role, json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._port = 0

    @property
    def port(self) -> int:
        """Waits until the process serves: processes that start together load torch together."""
        if not self._port:
            self._port = self.wait_event("Started", timeout_s=60)["port"] or -1
        return self._port

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def _take(self, fits: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if fits(event):
                    self.events.remove(event)
                    return event
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"nothing that fits within {timeout_s} s; seen {self.events}") from None
            assert line is not None, f"the process has ended; seen {self.events}"
            self.events.append(line)

    def wait_event(self, name: str, timeout_s: float = 10, **fields: Any) -> dict[str, Any]:
        return self._take(lambda e: e["event"] == name and all(e.get(k) == v for k, v in fields.items()), timeout_s)

    def do(self, name: str, timeout_s: float = 20, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.process.stdin.flush()
        return self.wait_event("Answer", timeout_s)["value"]

    def seen(self, name: str, **fields: Any) -> bool:
        """Whether such an event has come so far."""
        while not self._lines.empty():
            line = self._lines.get()
            if line is not None:
                self.events.append(line)
        return any(e["event"] == name and all(e.get(k) == v for k, v in fields.items()) for e in self.events)

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> int:
        """Asks it to end; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": "close"}) + "\n")
        self.process.stdin.flush()
        return self.process.wait(20)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


@pytest.fixture
def transport() -> str:
    return "gloo"


@pytest.fixture
def start(transport: str) -> Iterator[Callable[..., PeerProcess]]:
    started: list[PeerProcess] = []

    def make(role: str, **settings: Any) -> PeerProcess:
        started.append(PeerProcess(role, **{"transport": transport, **settings}))
        return started[-1]

    yield make
    for peer in started:
        if peer.process.poll() is None:
            peer.signal(signal.SIGCONT)
            peer.kill()
        for pipe in (peer.process.stdin, peer.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def pair(start: Callable[..., PeerProcess]) -> tuple[PeerProcess, PeerProcess]:
    """(sender, receiver), joined and open both ways. Their block sizes and dtypes differ."""
    sender = start("sender", incarnation=1)
    receiver = start("receiver", incarnation=2, layout={**LAYOUT, "block_tokens": 32, "dtype": "bf16"}, num_blocks=128)
    join(sender, receiver)
    return sender, receiver


def join(sender: PeerProcess, receiver: PeerProcess) -> None:
    assert receiver.port == -1, "a receiver listens nowhere"
    receiver.do("sources", sources=[[sender.incarnation, sender.port]])
    receiver.wait_event("SourceUp", incarnation=sender.incarnation)
    sender.wait_event("PeerUp", incarnation=receiver.incarnation)


def facts_when_idle(peer: PeerProcess, num_lanes: int, timeout_s: float = 15) -> dict[str, Any]:
    """The peer's facts once no transfer is left and only the lane threads of open links remain."""
    latest: dict[str, Any] = {}

    def is_idle() -> bool:
        latest.update(peer.do("facts"))
        return latest["transfers"] == 0 and latest["in_flight"] == 0 and len(latest["threads"]) == num_lanes

    wait_until(is_idle, timeout_s, f"idle with {num_lanes} lanes")
    return latest
