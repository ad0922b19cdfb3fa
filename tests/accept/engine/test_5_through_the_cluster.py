"""Line 5: rates through `baton serve` over HTTP as shares of the bare engine's. `--full` holds the targets over 5
rounds; the slice runs one and holds it to a third of them: other processes of the machine take cores at will.
"""

from pathlib import Path

import pytest

from tests.bench.engines import ROOT
from tests.bench.overhead import SHARES, measure_cluster
from tests.bench.rounds import Place

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_shares_of_the_bare_engine(smollm2: Path, tmp_path: Path, is_full: bool) -> None:
    place = Place(ROOT / "build" / "bench" / "venvs", tmp_path)
    rows, detail = measure_cluster(smollm2, place, 5 if is_full else 1, lambda text: None)
    shares = {row.name.split(" ")[0]: row.ratio for row in rows if row.ratio is not None}
    assert set(shares) == set(SHARES)
    for figure, least in SHARES.items():
        assert shares[figure] >= (least if is_full else least / 3)
    assert {"decode worker", "ingress", "the client"} <= set(detail["cpu us per token"]["single"][0])
