"""Interleaved measuring: in each round every engine is measured once per figure, while all others stand still."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.engines import DEFAULT, Engine, runner_command, runner_environ
from tests.bench.figures import Figure, Prompts, figures_of, measure
from tests.bench.process import EngineFailed, EngineProcess

Say = Callable[[str], None]


@dataclass(slots=True)
class Loaded:
    """What is known of an engine once it runs."""

    start_s: float
    """From its process's start to its first token."""
    facts: dict[str, Any]
    peak_memory_bytes: int = 0
    """After the first round of the three figures that every engine has."""


@dataclass(slots=True)
class Measured:
    """All of one thread count. `samples[engine][figure]` has one number per round, in their order; None where one
    failed.
    """

    threads: int
    samples: dict[str, dict[Figure, list[float | None]]] = field(default_factory=dict)
    loaded: dict[str, Loaded] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Engines that did not install, load or finish, with the reason."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where things are, environments and logs, and what they may take."""

    venvs: Path
    logs: Path
    has_precedence: bool = False
    """Other work of the machine waits for what is measured."""


def run_rounds(
    engines: Sequence[tuple[Engine, Path]], threads: int, rounds: int, prompts: Prompts, place: Place, say: Say
) -> Measured:
    """Measure (engine, weights) pairs."""
    measured = Measured(threads)
    with _start_all(engines, threads, prompts, place, say, measured) as processes:
        for number in range(rounds):
            for engine, _ in engines:
                if engine.name in processes:
                    _measure_engine(engine, processes[engine.name], prompts, measured, say)
            say(f"{threads} threads: round {number + 1} of {rounds} done")
    return measured


def _measure_engine(engine: Engine, process: EngineProcess, prompts: Prompts, measured: Measured, say: Say) -> None:
    samples = measured.samples.setdefault(engine.name, {})
    for figure in figures_of(engine, engine.name == DEFAULT):
        try:
            value: float | None = measure(process, figure, prompts)
        except EngineFailed as error:
            value = None
            say(f"{engine.name}, {figure}: {error}")
        samples.setdefault(figure, []).append(value)
        loaded = measured.loaded[engine.name]
        if figure == "prefill" and not loaded.peak_memory_bytes:
            loaded.peak_memory_bytes = process.peak_memory_bytes()
    process.pause()


@contextmanager
def _start_all(
    engines: Sequence[tuple[Engine, Path]], threads: int, prompts: Prompts, place: Place, say: Say, measured: Measured
) -> Iterator[dict[str, EngineProcess]]:
    """Every engine that loads, paused; the reasons of the others stand in `measured`."""
    with ExitStack() as stack:
        processes = {}
        for engine, weights in engines:
            try:
                process = stack.enter_context(start_engine(engine, weights, threads, place))
                measured.loaded[engine.name] = _load(engine, process, weights, threads, prompts)
            except EngineFailed as error:
                measured.missing[engine.name] = str(error)
                say(f"{engine.name} is not measured: {error}")
                continue
            process.pause()
            processes[engine.name] = process
            say(f"{threads} threads: {engine.name} answers after {measured.loaded[engine.name].start_s:.1f} s")
        yield processes


def start_engine(engine: Engine, weights: Path, threads: int, place: Place, cpus: Sequence[int] = ()) -> EngineProcess:
    place.logs.mkdir(parents=True, exist_ok=True)
    log = place.logs / f"{engine.name.replace(' ', '-')}-{threads}.log"
    process = EngineProcess(runner_command(engine, place.venvs), runner_environ(engine, threads), log, cpus)
    if place.has_precedence:
        process.take_precedence()
    return process


def _load(engine: Engine, process: EngineProcess, weights: Path, threads: int, prompts: Prompts) -> Loaded:
    facts = process.ask("load", engine.load_limit_s, model=str(weights), threads=threads, **engine.settings)
    process.ask("generate", engine.load_limit_s, prompts=prompts.short[:1], new_tokens=1)
    return Loaded(time.monotonic() - process.spawned_at, facts)
