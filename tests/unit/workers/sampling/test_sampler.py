"""The sampled distribution against the rules written down independently, and independence from the batch."""

import json
import math

import pytest
import torch

from workers.errors import StepFailed
from workers.ops.base import DrawRows
from workers.protocol import SamplingParams
from workers.sampling.explain import explain_draw
from workers.sampling.sampler import HEAD_WIDTHS, Draw, draw_exactly, sample

VOCAB = 40
NUM_DRAWS = 3_000


def make_logits(seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def expected_distribution(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The rules in plain Python, over lists: temperature, top-k, top-p of what is left, min-p."""
    weights = {i: math.exp(float(x) / params.temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    mass, kept, seen = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        if params.top_p < 1 and kept and seen >= params.top_p * mass:
            break
        kept.append(i)
        seen += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def chi_square_p(
    logits: torch.Tensor, params: SamplingParams, expected: list[float], draw_rows: DrawRows | None = None,
    num_draws: int = NUM_DRAWS,
) -> float:  # fmt: skip
    """The p-value of `num_draws` draws against `expected`, 0 when a token came that has no probability."""
    draws = [Draw(params, position) for position in range(num_draws)]
    tokens = sample(logits.expand(num_draws, -1).contiguous(), draws, draw_rows)
    counts = torch.bincount(torch.tensor(tokens), minlength=len(logits)).double()
    want = torch.tensor(expected, dtype=torch.float64) * num_draws
    if (counts[want == 0] > 0).any():
        return 0.0
    big = want >= 5
    terms = [(c - w) ** 2 / w for c, w in zip(counts[big].tolist(), want[big].tolist(), strict=True)]
    rest = float(want[~big].sum())
    if rest >= 5:
        terms.append((float(counts[~big].sum()) - rest) ** 2 / rest)
    degrees = len(terms) - 1
    if degrees < 1:
        return 1.0
    # Wilson-Hilferty: the cube root of a chi-square over its degrees is close to normal.
    z = ((sum(terms) / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


SETTINGS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.6, seed=2),
    SamplingParams(temperature=1.7, seed=3),
    SamplingParams(temperature=1.0, top_k=5, seed=4),
    SamplingParams(temperature=1.0, top_p=0.8, seed=5),
    SamplingParams(temperature=1.3, min_p=0.1, seed=6),
    SamplingParams(temperature=0.9, top_k=12, top_p=0.7, min_p=0.05, seed=7),
    SamplingParams(temperature=1.5, top_k=30, top_p=0.95, seed=8),
]


def with_heads(*widths: int) -> DrawRows:
    return lambda logits, draws: draw_exactly(logits, draws, widths)


@pytest.mark.parametrize("draw_rows", [with_heads(4, 16), with_heads(*HEAD_WIDTHS)], ids=["short heads", "heads"])
@pytest.mark.parametrize("params", SETTINGS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_the_sampled_distribution_is_the_rules(params: SamplingParams, draw_rows: DrawRows) -> None:
    logits = make_logits()
    assert chi_square_p(logits, params, expected_distribution(logits, params), draw_rows) > 1e-4


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        (SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=1.1)),
        (SamplingParams(temperature=1.0, top_k=5, seed=4), SamplingParams(temperature=1.0, top_k=6)),
        (SamplingParams(temperature=1.0, top_k=6, seed=4), SamplingParams(temperature=1.0, top_k=5)),
        (SamplingParams(temperature=1.0, top_p=0.8, seed=5), SamplingParams(temperature=1.0, top_p=0.6)),
        (SamplingParams(temperature=1.3, min_p=0.1, seed=6), SamplingParams(temperature=1.3)),
    ],
)
def test_a_wrong_rule_fails_the_same_test(params: SamplingParams, wrong: SamplingParams) -> None:
    logits = make_logits()
    assert chi_square_p(logits, params, expected_distribution(logits, wrong), num_draws=8_000) < 1e-6


def test_greedy_takes_the_maximum() -> None:
    logits = torch.stack([make_logits(seed) for seed in range(6)])
    draws = [Draw(SamplingParams(seed=9), position) for position in range(6)]
    assert sample(logits, draws) == [int(max(range(VOCAB), key=row.__getitem__)) for row in logits.tolist()]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=1.0, top_p=0.0),
               SamplingParams(temperature=1.0, min_p=1.0), SamplingParams(temperature=1e-6)],
)  # fmt: skip
def test_the_narrowest_settings_are_greedy(params: SamplingParams) -> None:
    logits = make_logits(3)
    assert set(sample(logits.expand(50, -1), [Draw(params, i) for i in range(50)])) == {int(logits.argmax())}


def test_a_token_depends_on_its_own_row_only() -> None:
    params = [*SETTINGS, SamplingParams()]
    rows = torch.stack([make_logits(i, 3000) for i in range(len(params))])
    draws = [Draw(p, 17 + i) for i, p in enumerate(params)]
    alone = [sample(rows[i : i + 1], [draws[i]])[0] for i in range(len(params))]
    order = list(reversed(range(len(params))))
    assert sample(rows, draws) == alone
    assert sample(rows[order], [draws[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("params", SETTINGS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_the_sorted_head_changes_no_token(params: SamplingParams) -> None:
    rows = torch.stack([make_logits(i, 3000) for i in range(60)])
    draws = [Draw(params, i) for i in range(60)]
    whole = sample(rows, draws, with_heads())
    assert sample(rows, draws, with_heads(16)) == whole
    assert sample(rows, draws, with_heads(4, 1024)) == whole


def test_ties_across_the_edge_of_the_head_go_to_the_lower_id() -> None:
    logits = torch.zeros(100)
    params = SamplingParams(temperature=1.0, top_k=10, seed=3)
    tokens = set(sample(logits.expand(500, -1), [Draw(params, i) for i in range(500)], with_heads(16)))
    assert tokens == set(range(10))


def test_removed_tokens_are_minus_infinity() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[4, 9]] = 1.0
    params = SamplingParams(temperature=2.0, seed=1)
    assert set(sample(logits.expand(100, -1), [Draw(params, i) for i in range(100)])) == {4, 9}


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, torch.inf])
def test_logits_that_are_no_numbers_fail_the_step(bad: float) -> None:
    logits = torch.stack([make_logits(1), torch.full((VOCAB,), bad)])
    with pytest.raises(StepFailed, match="1 of 2 sampled rows"):
        sample(logits, [Draw(SamplingParams(), 0)] * 2)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-9, 9e-6])
def test_a_temperature_that_would_overflow_is_greedy(temperature: float) -> None:
    logits = make_logits()
    params = SamplingParams(temperature=temperature, top_k=5, min_p=0.1, seed=3)
    assert sample(logits[None], [Draw(params, 0)]) == [int(logits.argmax())]
    facts = explain_draw(logits, Draw(params, 0), int(logits.argmax()))
    assert "NaN" not in json.dumps(facts)
