"""What the cluster costs: rates through `baton serve` over HTTP as shares of the bare engine's on one core with one
thread. Rounds interleave both.

The laptop configuration: one prefill and one decode worker with a thread each, ingress and proxy beside them, and the
client of the bench on the same cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.bench.engines import DEFAULT, ENGINES
from tests.bench.figures import LIMIT_S, make_prompts
from tests.bench.process import EngineProcess, take_precedence
from tests.bench.rounds import Place, start_engine
from tests.bench.rows import Row, compare, spread
from tests.support.real_server import RealServer

CLIENT = Path(__file__).with_name("sse_client.py")
CORE = 1
NEW_TOKENS = 192
SHARES = {"single": 0.80, "batch16": 0.85}
"""Targets of acceptance line 5."""
STREAMS = {"single": 1, "batch16": 16}
ROLES = {"ingress": "ingress", "decode": "decode worker", "prefill": "prefill worker"}


def measure_cluster(
    folder: Path, place: Place, rounds: int, say: Callable[[str], None]
) -> tuple[list[Row], dict[str, Any]]:
    prompts = make_prompts(folder).short
    bare: dict[str, list[float | None]] = defaultdict(list)
    served: dict[str, list[float | None]] = defaultdict(list)
    profiles: dict[str, list[dict[str, float]]] = defaultdict(list)
    engine = next(engine for engine in ENGINES if engine.name == DEFAULT)
    with start_engine(engine, folder, 1, place, (CORE,)) as process:
        process.ask("load", engine.load_limit_s, model=str(folder), threads=1, **engine.settings)
        process.pause()
        server = RealServer().wait_ready()
        try:
            server.wait_healthy()
            if place.has_precedence:
                _take_precedence(server)
            _served(server, prompts[:1], 8)
            for number in range(rounds):
                for figure, streams in STREAMS.items():
                    bare[figure].append(_bare_rate(process, prompts[:streams]))
                    answer, profile = _profiled(server, prompts[:streams])
                    served[figure].append(answer["tokens_per_s"])
                    profiles[figure].append(profile)
                say(f"cluster: round {number + 1} of {rounds} done")
        finally:
            server.end()
    rows = [row for figure in STREAMS for row in _rows(figure, bare[figure], served[figure], profiles[figure])]
    return rows, {"bare": bare, "served": served, "cpu us per token": profiles}


def _take_precedence(server: RealServer) -> None:
    """The server's sessions and ours, in which the client runs."""
    take_precedence(os.getpid())
    for process in server.processes():
        take_precedence(process.pid)


def _rows(
    figure: str, bare: Sequence[float | None], served: Sequence[float | None], profiles: Sequence[dict[str, float]]
) -> list[Row]:
    name = f"{figure} over HTTP"
    rows = [
        spread(f"{figure}, bare engine, 1 thread on one core", "tok/s", bare),
        compare(name, "tok/s", served, bare, "bare engine", SHARES[figure]),
    ]
    rows += [
        spread(f"{name}, CPU of {role}", "us/token", [profile.get(role, 0.0) for profile in profiles])
        for role in sorted({role for profile in profiles for role in profile})
    ]
    return [row for row in rows if row is not None]


def _bare_rate(process: EngineProcess, prompts: Sequence[Sequence[int]]) -> float:
    process.ask("generate", LIMIT_S, prompts=prompts, new_tokens=2)
    timing = process.ask("generate", LIMIT_S, prompts=prompts, new_tokens=NEW_TOKENS)
    process.pause()
    return float(timing["decoded"] / timing["decode_s"])


def _profiled(server: RealServer, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], dict[str, float]]:
    """What the client saw, and microseconds of processor time per token of every process of the server."""
    before = _cpu_seconds(server)
    answer = _served(server, prompts, NEW_TOKENS)
    after = _cpu_seconds(server)
    spent = {role: after[role] - before.get(role, 0.0) for role in after} | {"the client": answer["client_cpu_s"]}
    return answer, {role: seconds * 1e6 / answer["tokens"] for role, seconds in spent.items()}


def _served(server: RealServer, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        command = [sys.executable, "-S", str(CLIENT), str(server.port), str(new_tokens), file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"the client of the bench failed: {done.stderr[-500:]}")
    return dict(json.loads(done.stdout))


def _cpu_seconds(server: RealServer) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    for process in server.processes():
        try:
            times = process.cpu_times()
            spent[_role(process)] += times.user + times.system
        except psutil.Error:
            continue
    return dict(spent)


def _role(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    if "ServeReplica" in title:
        return next((role for part, role in ROLES.items() if part in title), "other replicas")
    return "Serve's proxy" if "ProxyActor" in title else "the rest of Ray"
