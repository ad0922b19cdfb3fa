"""The C++ way of drawing against the rules in float64, on every level that this processor has."""

import math

import pytest
import torch

from tests.unit.workers.sampling.test_sampler import SETTINGS, chi_square_p, expected_distribution, make_logits
from workers.errors import BackendUnavailable, StepFailed
from workers.ops.base import RowDraw
from workers.ops.native import LEVELS, Level, NativeOps
from workers.protocol import SamplingParams
from workers.sampling.sampler import Draw, draw_exactly, find_largest, sample


@pytest.fixture(scope="module", params=LEVELS)
def native(request: pytest.FixtureRequest) -> NativeOps:
    level: Level = request.param
    try:
        return NativeOps(1, level)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def name_of(params: SamplingParams) -> str:
    return f"T{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}"


@pytest.mark.parametrize("params", SETTINGS, ids=name_of)
def test_the_distribution_is_the_rules(native: NativeOps, params: SamplingParams) -> None:
    logits = make_logits()
    expected = expected_distribution(logits, params)
    assert chi_square_p(logits, params, expected, native.draw, num_draws=6_000) > 1e-4


@pytest.mark.parametrize("vocab", [1, 15, 17, 1024, 3001, 49_152])
@pytest.mark.parametrize("params", SETTINGS, ids=name_of)
def test_tokens_are_those_of_the_oracle(native: NativeOps, params: SamplingParams, vocab: int) -> None:
    """float32 may put a uniform on the other side of an edge: at most one row."""
    rows = torch.stack([make_logits(seed, vocab) * 2 for seed in range(24 if vocab < 10_000 else 6)])
    draws = [
        RowDraw(row, params.temperature, params.top_k, params.top_p, params.min_p, Draw(params, row).uniform)
        for row in range(len(rows))
    ]
    ours, wanted = native.draw(rows, draws), draw_exactly(rows, draws)
    assert sum(a != b for a, b in zip(ours, wanted, strict=True)) <= 1


def test_any_number_of_threads_draws_the_same(native: NativeOps) -> None:
    rows = torch.stack([make_logits(seed, 5000) for seed in range(32)])
    draws = [Draw(SETTINGS[row % len(SETTINGS)], row) for row in range(32)]
    pair = NativeOps(2, native.level)
    assert sample(rows, draws, native.draw) == sample(rows, draws, pair.draw)
    assert [sample(rows[i : i + 1].contiguous(), [draws[i]], pair.draw)[0] for i in range(32)] == sample(
        rows, draws, native.draw
    )


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_removed_tokens_never_come(native: NativeOps, uniform: float) -> None:
    row = torch.full((1, 2000), -torch.inf)
    row[0, [4, 1999]] = 1.0
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (50, 0.99, 0.2)):
        (token,) = native.draw(row, [RowDraw(0, 2.0, top_k, top_p, min_p, uniform)])
        assert token in (4, 1999)


def test_a_flat_row_keeps_the_lowest_ids(native: NativeOps) -> None:
    row = torch.zeros(1, 3000)
    drawn = {native.draw(row, [RowDraw(0, 1.0, 10, 1.0, 0.0, step / 100)])[0] for step in range(100)}
    assert drawn == set(range(10))
    assert {native.draw(row, [RowDraw(0, 1.0, 0, 0.01, 0.0, s / 100)])[0] for s in range(100)} == set(range(30))


@pytest.mark.parametrize("vocab", [1, 15, 17, 1024, 1040, 3001, 49_152])
def test_the_largest_is_the_first_of_equals(native: NativeOps, vocab: int) -> None:
    rows = torch.stack([make_logits(seed, vocab).round() for seed in range(20)])
    rows[1] = -torch.inf
    rows[2] = -3.0
    rows[3, vocab // 2 :] = torch.inf
    assert native.find_largest(rows) == find_largest(rows)
    rows[4, vocab - 1] = torch.nan
    rows[5, 0] = torch.nan
    best, _ = native.find_largest(rows)
    assert [row for row, logit in enumerate(best) if math.isnan(logit)] == [4, 5]
    with pytest.raises(StepFailed, match="4 of 20"):
        sample(rows, [Draw(SamplingParams(temperature=0.0), 0)] * 20, find=native.find_largest)
