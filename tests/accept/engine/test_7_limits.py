"""Line 7: how far single-stream decode and the linear layers of prefill are from this machine's limits. `--full` holds
the targets over 5 rounds with 2 threads and with 1; the slice measures one round and holds what no load can change.
"""

from pathlib import Path

import pytest

from tests.bench.engines import ROOT
from tests.bench.limits import BANDWIDTH_SHARE, INTEGER_SHARE, measure_limits
from tests.bench.rounds import Place
from workers.errors import BackendUnavailable
from workers.ops.native import load_library

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(600)]


def _native_fault() -> str:
    try:
        load_library()
    except BackendUnavailable as error:
        return str(error)
    return ""


def test_shares_of_the_limits(smollm2: Path, tmp_path: Path, is_full: bool) -> None:
    if fault := _native_fault():
        pytest.skip(fault)
    place = Place(ROOT / "build" / "bench" / "venvs", tmp_path / "logs")
    rows, detail = measure_limits(smollm2, place, 5 if is_full else 1, lambda text: None, (2, 1) if is_full else (1,))
    assert detail["1 threads"]["bytes per token"] > detail["1 threads"]["layer_weights"] / 2, "4 bits and more a weight"
    shares = {row.name: (row.ratio, row.against) for row in rows if row.ratio is not None}
    assert len(shares) >= 2
    for name, (share, against) in shares.items():
        least = BANDWIDTH_SHARE if against == "read bandwidth" else INTEGER_SHARE
        assert share >= least if is_full else share > 0, name
        assert against == "read bandwidth" or share <= 1, f"{name}: more than the processor can"
