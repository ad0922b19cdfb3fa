"""Line 6: each mode keeps the bounds of docs/models.md on fixed texts. The slice takes 128 tokens of each text in every
checkout; `--full` all texts whole, those of Debian too where they are.
"""

from pathlib import Path

import pytest

from tests.bench.quality import Mode, Quality, judge_modes
from tests.bench.texts import SETS, read_set
from tests.support.bounds import read_bounds

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(1800)]

MODES: tuple[Mode, ...] = (("q4", "bf16"), ("int8", "bf16"), ("bf16", "bf16"), ("fp32", "fp32"))
SLICE_TOKENS = 128


def assert_within(found: dict[Mode, Quality]) -> None:
    bounds = read_bounds()
    assert set(bounds) == {"bf16", "int8", "q4"}
    assert bounds["q4"] == (0.010, 0.95, 0.02), "what the default was promised to keep"
    for (weights, _), quality in found.items():
        kl, top1, change = bounds.get(weights, (1e-6, 0.999, 1e-4))
        assert quality.kl <= kl, f"{weights}: {quality}"
        assert quality.top1 >= top1, f"{weights}: {quality}"
        assert abs(quality.perplexity_change) <= change, f"{weights}: {quality}"
    assert found["q4", "bf16"].kl > found["bf16", "bf16"].kl > 0, "modes are what they are called"


def test_shipped_texts(smollm2: Path, is_full: bool) -> None:
    texts, missing = read_set("shipped", smollm2, 768 if is_full else SLICE_TOKENS)
    assert missing == {}
    assert_within(judge_modes(smollm2, MODES, texts, lambda text: None))


def test_texts_of_debian(smollm2: Path, is_full: bool) -> None:
    texts, missing = read_set("debian", smollm2)
    if not is_full or missing:
        pytest.skip(f"with --full, where they are; missing: {missing or 'none'}")
    assert set(texts) == {text.name for text in SETS["debian"]}
    assert_within(judge_modes(smollm2, MODES, texts, lambda text: None))
