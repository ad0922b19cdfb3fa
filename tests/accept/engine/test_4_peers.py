"""Line 4: the engine against its peers. The slice runs Baton's default through the bench's machinery; `--full` holds
the start, and the ratios to the peers whose environments `make bench-engine` has made.
"""

from pathlib import Path

import pytest

from tests.bench.compared import LEAST, READY_S, best_peer, compared_rows
from tests.bench.engines import DEFAULT, ENGINES, ONNXRUNTIME, ROOT, Engine
from tests.bench.figures import make_prompts
from tests.bench.rounds import Measured, Place, run_rounds
from tests.bench.weights import provide

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(3600)]

BUSY_READY_S = 30.0
"""Where other processes take the cores: 2 s become several."""
BUILD = ROOT / "build" / "bench"


def run(engines: list[tuple[Engine, Path]], threads: int, rounds: int, folder: Path, logs: Path) -> Measured:
    return run_rounds(engines, threads, rounds, make_prompts(folder), Place(BUILD / "venvs", logs), lambda text: None)


def test_the_default_starts_and_measures_itself(smollm2: Path, tmp_path: Path, is_full: bool) -> None:
    engine = next(engine for engine in ENGINES if engine.name == DEFAULT)
    measured = run([(engine, smollm2)], 1, 1, smollm2, tmp_path)
    assert measured.missing == {}
    assert measured.loaded[DEFAULT].start_s <= (READY_S if is_full else BUSY_READY_S)
    single, batch = (measured.samples[DEFAULT][figure][0] for figure in ("single", "batch16"))
    assert single is not None
    assert batch is not None
    assert batch > 1.5 * single, "16 streams share each reading of the weights"
    assert {row.name.split(":")[0] for row in compared_rows(measured)} >= {"single, 1 thread", "contexts4000, 1 thread"}


@pytest.mark.parametrize("threads", [2, 1])
def test_ratios_to_the_best_peer(smollm2: Path, tmp_path: Path, is_full: bool, threads: int) -> None:
    installed = [e for e in ENGINES if e.package and (BUILD / "venvs" / e.package.name / "installed.txt").exists()]
    if not is_full or not installed:
        pytest.skip("with --full, after `make bench-engine BENCH=install`")
    chosen = [next(e for e in ENGINES if e.name == DEFAULT), *installed]
    pairs = [(e, provide(e.form, smollm2, BUILD / "weights", BUILD / "venvs", ONNXRUNTIME)) for e in chosen]
    measured = run(pairs, threads, 3, smollm2, tmp_path)
    assert measured.missing == {}
    assert all(best_peer(measured, figure) for figure in LEAST)
    short = [row for row in compared_rows(measured) if row.holds is False]
    assert not short, "\n".join(f"{row.name}: {row.ratio:.2f}x of {row.against}, {row.target}" for row in short)
