"""From the start of `baton serve`, with the model in the cache, to the first answer of a client."""

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

from tests.bench.rows import Row
from tests.support.real_server import RealServer
from tests.support.serve_process import wait_for

LIMIT_S = 120.0
MAX_STARTS = 3


def measure_ready(rounds: int, say: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    """The whole cluster each time: Ray, ingress, a prefill and a decode worker."""
    samples: list[float] = []
    for number in range(min(rounds, MAX_STARTS)):
        samples.append(_start_once())
        say(f"baton serve answered {samples[-1]:.1f} s after its start ({number + 1} of {min(rounds, MAX_STARTS)})")
    median = sorted(samples)[len(samples) // 2]
    row = Row(
        name="baton serve: process start to first answer (Ray, ingress, two workers)", unit="s", value=median,
        min=min(samples), max=max(samples),
    )  # fmt: skip
    return [row], {"samples": samples}


def _start_once() -> float:
    started = time.monotonic()
    server = RealServer()
    try:
        return float(str(wait_for("a first answer", lambda: _ask(server.port), LIMIT_S))) - started
    finally:
        server.end()


def _ask(port: int) -> float | None:
    """The time at which one token was answered; None while nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({"model": "smollm2-135m", "prompt": [5, 6, 7], "max_tokens": 1})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if connection.getresponse().status == 200:
            return time.monotonic()
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    return None
