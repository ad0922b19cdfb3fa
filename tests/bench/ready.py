"""From the start of a process, with the model in the cache, to the first answer over HTTP: of `baton serve`, and of the
same two workers behind the front door without Ray.
"""

import http.client
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.compared import READY_S
from tests.bench.engines import ROOT, RUNNERS
from tests.bench.process import EngineProcess, take_precedence
from tests.bench.rounds import Place
from tests.bench.rows import Row
from tests.support.real_server import RealServer
from tests.support.serve_process import wait_for

LIMIT_S = 120.0
MAX_STARTS = 3


def measure_ready(
    folder: Path, place: Place, rounds: int, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, Any]]:
    bare: list[float] = []
    whole: list[float] = []
    for _ in range(min(rounds, MAX_STARTS)):
        bare.append(_start_without_ray(folder, place))
        whole.append(_start_serve(place))
        say(f"first answer after {bare[-1]:.1f} s without Ray, {whole[-1]:.1f} s by baton serve")
    rows = [
        _row("front door and two workers without Ray, start to first answer", bare, f"<= {READY_S:g} s"),
        _row("baton serve (Ray, ingress, two workers), start to first answer", whole, ""),
    ]
    return rows, {"without Ray": bare, "baton serve": whole}


def _row(name: str, samples: list[float], target: str) -> Row:
    value = median(samples)
    holds = value <= READY_S if target else None
    return Row(name=name, value=value, unit="s", min=min(samples), max=max(samples), target=target, holds=holds)


def _start_without_ray(folder: Path, place: Place) -> float:
    place.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", str(RUNNERS / "run_without_ray.py")]
    with EngineProcess(command, {"PYTHONPATH": f"{RUNNERS}:{ROOT}"}, place.logs / "without-ray.log") as process:
        if place.has_precedence:
            process.take_precedence()
        process.ask("load", LIMIT_S, model=str(folder))
        process.ask("answer", LIMIT_S)
        took = time.monotonic() - process.spawned_at
        process.ask("close", LIMIT_S)
    return took


def _start_serve(place: Place) -> float:
    started = time.monotonic()
    server = RealServer()
    if place.has_precedence:
        take_precedence(server.process.pid)
    try:
        answered = wait_for("a first answer", lambda: _ask(server.port), LIMIT_S)
        assert isinstance(answered, float)
        return answered - started
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
