"""Line 2, first half: pools grow and shrink by hand under load; nobody notices, and nothing is left behind."""

import itertools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.raw_client import RawStream
from tests.support.real_server import RealServer
from tests.support.serve_process import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
NUM_STREAMS = 16


@pytest.fixture
def server() -> Iterator[RealServer]:
    server = RealServer()
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


class Crowd:
    """16 clients that ask for one stream after the other until told to stop."""

    def __init__(self, port: int, num_tokens: int) -> None:
        self._port, self._num_tokens = port, num_tokens
        self._is_over = threading.Event()
        self._counter = itertools.count()
        self.faults: list[str] = []
        self.num_done = 0
        self._threads = [threading.Thread(target=self._live, daemon=True) for _ in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def _live(self) -> None:
        while not self._is_over.is_set():
            number = next(self._counter)
            body = {"model": "smollm2-135m", "stream": True, "temperature": 0, "ignore_eos": True,
                    "max_tokens": self._num_tokens, "stream_options": {"include_usage": True},
                    "prompt": f"Story number {number}. " + "Once upon a time " * (number % 7 + 1)}  # fmt: skip
            fault = self._ask(body)
            if fault is not None:
                self.faults.append(f"stream {number}: {fault}")
            self.num_done += 1

    def _ask(self, body: dict) -> str | None:
        """What is wrong with the answer."""
        try:
            stream = RawStream(self._port, "/v1/completions", body)
        except OSError as error:
            return repr(error)
        try:
            events = list(stream.events())
        except OSError as error:
            return repr(error)
        finally:
            stream.hang_up()
        if not events or events[-1] != "[DONE]":
            return f"cut: {events[-1:]}"
        chunks = [json.loads(event) for event in events[:-1]]
        count = chunks[-1].get("usage", {}).get("completion_tokens")
        return None if count == self._num_tokens else f"{count} tokens of {self._num_tokens}"

    def wait_streams(self, count: int) -> None:
        """That many more streams have ended."""
        wanted = self.num_done + count
        wait_for(f"{count} more streams", lambda: self.num_done >= wanted or self.faults, 240.0)

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(240.0)


def scale(server: RealServer, pool: str, replicas: int) -> None:
    command = [sys.executable, "-m", "cluster", "scale", pool, str(replicas), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=330)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([w for w in server.workers() if w["pool"] == pool]) == replicas


def test_pools_grow_and_shrink_under_sixteen_streams(server: RealServer, is_full: bool) -> None:
    """1 -> 3 -> 1 of either pool (decode alone, 1 -> 2 -> 1, in the slice)."""
    crowd = Crowd(server.port, 120 if is_full else 24)
    crowd.wait_streams(4)
    for pool, most in (("decode", 3), ("prefill", 3)) if is_full else (("decode", 2),):
        scale(server, pool, most)
        crowd.wait_streams(NUM_STREAMS)
        scale(server, pool, 1)
        crowd.wait_streams(NUM_STREAMS)
    crowd.stop()
    assert crowd.faults == []
    server.wait_idle()
    assert len(server.workers()) == 2
    for worker in server.workers():
        computed = worker["computed_prompt_tokens"]
        assert worker["pool"] == "prefill" or computed == dict.fromkeys(computed, 0), computed
    check_lanes(Path(re.search(r"a line per request: (\S+)", server.output).group(1)), 4 if is_full else 1)


def check_lanes(logs: Path, most_extra: int) -> None:
    """Each decode worker opened one lane to each prefill worker that it ever knew, whatever the number of requests."""
    opened = [
        re.findall(r"opening lane \w+ to prefill worker (\w+)", path.read_text()) for path in logs.glob("decode-*.log")
    ]
    assert all(len(peers) == len(set(peers)) for peers in opened), opened
    assert 2 <= sum(map(len, opened)) <= 2 + most_extra, opened
