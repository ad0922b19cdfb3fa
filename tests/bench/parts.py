"""The parts of `make bench-engine`, in their order: what each needs, and where its results go."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster.config import ModelConfig, find_config
from cluster.env import cache_dir
from cluster.model_store import ensure_model
from cluster.yaml_source import load_yaml
from tests.bench import docs, install, weights
from tests.bench.compared import compared_rows
from tests.bench.engines import ONNXRUNTIME, Engine
from tests.bench.figures import WHAT, make_prompts
from tests.bench.limits import measure_limits
from tests.bench.overhead import measure_cluster
from tests.bench.quality import measure_quality
from tests.bench.ready import measure_ready
from tests.bench.results import store_part
from tests.bench.rounds import Measured, Place, run_rounds
from tests.bench.rows import Row, print_rows

Say = Callable[[str], None]


class BenchFailed(Exception):
    """Nothing can be measured; the text says why."""


@dataclass(frozen=True)
class Bench:
    build: Path
    engines: tuple[Engine, ...]
    rounds: int
    threads: tuple[int, ...]
    say: Say
    has_precedence: bool = False

    def run(self, part: str) -> None:
        """Raises `BenchFailed`."""
        getattr(self, f"_run_{part}")()

    @property
    def results(self) -> Path:
        return self.build / "engine.json"

    @property
    def place(self) -> Place:
        return Place(self.build / "venvs", self.build / "logs", self.has_precedence)

    @cached_property
    def folder(self) -> Path:
        """The shipped model, converted; fetched when absent."""
        return ensure_model(load_yaml(find_config("models", "smollm2-135m"), ModelConfig), cache_dir())

    @cached_property
    def provided(self) -> tuple[list[tuple[Engine, Path]], dict[str, str]]:
        """Engines with their weights, and the reasons of those that are not to be had."""
        ready, missing = [], {}
        for engine in self.engines:
            try:
                if engine.package is not None:
                    install.install(engine.package, self.place.venvs, self.say)
                path = weights.provide(engine.form, self.folder, self.build / "weights", self.place.venvs, ONNXRUNTIME)
            except (install.NotInstalled, weights.NotConverted) as error:
                missing[engine.name] = str(error)
                self.say(f"{engine.name} is not measured: {error}")
            else:
                ready.append((engine, path))
        return ready, missing

    def _run_install(self) -> None:
        ready, _ = self.provided
        self.say(f"ready: {', '.join(engine.name for engine, _ in ready)}")

    def _run_peers(self) -> None:
        ready, missing = self.provided
        prompts = make_prompts(self.folder)
        passes = [
            run_rounds(self._engines_of(ready, n), n, self.rounds, prompts, self.place, self.say) for n in self.threads
        ]
        rows = [row for measured in passes for row in compared_rows(measured)]
        lost = {name: reason for measured in passes for name, reason in measured.missing.items()} | missing
        self._report(
            "peers", rows, what=WHAT, missing=lost, passes=[_pass_detail(measured) for measured in passes],
            peer_versions=self._peer_versions(ready),
        )  # fmt: skip
        for name, reason in lost.items():
            print(f"not measured: {name}: {reason}")

    def _engines_of(self, ready: Sequence[tuple[Engine, Path]], threads: int) -> list[tuple[Engine, Path]]:
        return [(e, path) for e, path in ready if not e.is_frontier or threads == self.threads[0]]

    def _run_limits(self) -> None:
        rows, detail = measure_limits(self.folder, self.place, self.rounds, self.say)
        self._report("limits", rows, **detail)

    def _run_ready(self) -> None:
        rows, detail = measure_ready(self.folder, self.place, self.rounds, self.say)
        self._report("ready", rows, **detail)

    def _run_cluster(self) -> None:
        rows, detail = measure_cluster(self.folder, self.place, self.rounds, self.say)
        self._report("cluster", rows, **detail)

    def _run_quality(self) -> None:
        rows, detail = measure_quality(self.folder, self.say)
        self._report("quality", rows, **detail)

    def _run_docs(self) -> None:
        for path in docs.write(self.results):
            self.say(f"written: {path}")

    def _report(self, part: str, rows: Sequence[Row], **detail: Any) -> None:
        store_part(self.results, part, rows, **detail)
        print(print_rows(rows), flush=True)

    def _peer_versions(self, ready: Sequence[tuple[Engine, Path]]) -> dict[str, dict[str, str]]:
        packages = {engine.package.name: engine.package for engine, _ in ready if engine.package is not None}
        return {name: install.versions(package, self.place.venvs) for name, package in packages.items()}


def _pass_detail(measured: Measured) -> dict[str, Any]:
    return {
        "threads": measured.threads,
        "samples": measured.samples,
        "loaded": {name: asdict(loaded) for name, loaded in measured.loaded.items()},
    }
