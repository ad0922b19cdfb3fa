"""How far Baton's default is from this machine's limits: bytes read per token against the measured read bandwidth, and
8-bit operations in the linear layers of prefill against the measured peak. Rounds interleave limit and engine.
"""

import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.engines import DEFAULT, ENGINES, Engine
from tests.bench.figures import Prompts, make_prompts, measure
from tests.bench.process import EngineProcess, take_precedence
from tests.bench.rounds import Place, start_engine
from tests.bench.rows import Row, compare, spread
from workers.native.build import find_compiler

SOURCE = Path(__file__).with_name("limits.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread")
BANDWIDTH_SHARE, INTEGER_SHARE = 0.6, 0.5
"""Targets of acceptance line 7."""
SINGLE_CONTEXT = 64 + 64 // 2
"""Mean context of the figure `single`: its KV is read once per token, too."""
Samples = dict[str, list[float | None]]


def measure_limits(
    folder: Path, place: Place, rounds: int, say: Callable[[str], None], counts: tuple[int, ...] = (2, 1)
) -> tuple[list[Row], dict[str, Any]]:
    """Rows and details for each count of threads."""
    program = _build(place.logs.parent)
    if program is None:
        return [], {"missing": "no C++ compiler: the limits are not measured"}
    rows: list[Row] = []
    detail: dict[str, Any] = {}
    engine = next(engine for engine in ENGINES if engine.name == DEFAULT)
    for threads in counts:
        found, facts = _measure_threads(engine, folder, threads, rounds, (program, place))
        rows += found
        detail[f"{threads} threads"] = facts
        say(f"limits: {threads} threads measured")
    return rows, detail


def _measure_threads(
    engine: Engine, folder: Path, threads: int, rounds: int, tools: tuple[Path, Place]
) -> tuple[list[Row], dict[str, Any]]:
    program, place = tools
    prompts, samples = make_prompts(folder), Samples()
    with start_engine(engine, folder, threads, place) as process:
        process.ask("load", engine.load_limit_s, model=str(folder), threads=threads, **engine.settings)
        weights = process.ask("weights", 60)
        bytes_per_token = (
            weights["layer_bytes"] + weights["head_bytes"] + SINGLE_CONTEXT * weights["kv_bytes_per_token"]
        )
        for _ in range(rounds):
            process.pause()
            if place.has_precedence:
                take_precedence(os.getpid())
            measured = {
                "read": _ask(program, "read", str(weights["layer_bytes"] + weights["head_bytes"]), str(threads)),
                "int8": _ask(program, "int8", str(threads)),
                "used": bytes_per_token * measure(process, "single", prompts) / 1e9,
                **_prefill_ops(process, prompts, weights["layer_weights"]),
            }
            for name, value in measured.items():
                samples.setdefault(name, []).append(value)
        stages = process.ask("stages", 120, prompts=prompts.short[:1], new_tokens=64)
        batch_stages = process.ask("stages", 120, prompts=prompts.short, new_tokens=64)
    facts = {**weights, "bytes per token": bytes_per_token, "samples": samples, "stages single": stages,
             "stages batch16": batch_stages}  # fmt: skip
    return _rows(samples, threads), facts


def _prefill_ops(process: EngineProcess, prompts: Prompts, weights: int) -> dict[str, float]:
    """Gop/s of the linear layers, and the share of each stage in the step."""
    spent = process.ask("stages", 120, prompts=[prompts.long], new_tokens=1)["ms"]["prompt"]
    ops = 2.0 * weights * len(prompts.long)
    return {
        "linears": ops / spent["linears"] / 1e6,
        **{f"prefill {name} ms": spent[name] for name in ("rows", "linears", "attention", "head", "step")},
    }


def _rows(samples: Samples, threads: int) -> list[Row]:
    suffix = f", {threads} thread{'s' if threads > 1 else ''}"
    rows = [
        spread("read bandwidth over the model's bytes" + suffix, "GB/s", samples["read"]),
        compare(
            "single stream, bytes read" + suffix, "GB/s", samples["used"], samples["read"], "read bandwidth",
            BANDWIDTH_SHARE,
        ),
    ]  # fmt: skip
    if all(samples["int8"]):
        rows += [
            spread("8-bit dot products in registers" + suffix, "Gop/s", samples["int8"]),
            compare(
                "prefill, linear layers" + suffix, "Gop/s", samples["linears"], samples["int8"], "8-bit peak",
                INTEGER_SHARE,
            ),
        ]  # fmt: skip
    rows += [
        spread(f"prefill of 1,024, {stage}{suffix}", "ms", samples[f"prefill {stage} ms"])
        for stage in ("linears", "attention", "rows", "head", "step")
    ]
    return [row for row in rows if row is not None]


def _ask(program: Path, *arguments: str) -> float:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True, timeout=60)
    return float(done.stdout)


def _build(place: Path) -> Path | None:
    """The program, rebuilt when its source changed; None without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        return None
    program = place / f"limits-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=True, timeout=120)
    return program
