"""The one-line diagnosis: told from measured times and targets, never a guess."""

import pytest

from cluster.diagnosis import Measured, Targets, diagnose

TARGETS = Targets(ttft_ms=2000, itl_ms=150)


@pytest.mark.parametrize(
    ("measured", "bound", "told"),
    [
        (Measured(2500, 50, 1000), "prefill", "prefill-bound: TTFT 2,500 ms against a target of 2,000 ms"),
        (Measured(500, 200, 9000), "decode", "decode-bound: ITL 200.0 ms against a target of 150 ms"),
        (Measured(2500, 200, 9000), "both", "prefill-bound and decode-bound"),
        (Measured(2000, 150, 100), "neither", "95% of the time was the time to the first token"),
        (Measured(100, 100, 900), "neither", "90% of the time was generating tokens"),
        (Measured(100, None, 0), "neither", "neither target is missed"),
    ],
)
def test_each_case(measured, bound, told):
    diagnosis = diagnose(measured, TARGETS)
    assert diagnosis.bound == bound
    assert told in diagnosis.line


def test_the_lever_is_named():
    assert "more prefill workers" in diagnose(Measured(9000, 10, 10), TARGETS).line
    assert "quantized weights" in diagnose(Measured(9, 1000, 10), TARGETS).line
