"""Line 2: not a bit of a logit depends on threads, chunks or company: native backend, every weight mode and level.

Forty chunks of 1 to 21 tokens; 2 threads on a machine with one core are as good a test. The whole text runs 256 rows
over unpacked panels of pairs and 44 over single blocks, the batch 107 over pairs unpacked in registers.
"""

import random
from pathlib import Path
from typing import get_args

import pytest
import torch

from kv_transfer.layout import Dtype
from tests.support.native_runs import load_native, logits_in_a_batch, logits_in_pieces, logits_whole
from tests.support.tiny_models import save_tiny
from workers.model.build import WeightMode
from workers.model.decoder import Decoder
from workers.ops.native import LEVELS, Level

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(900)]

MODES: tuple[WeightMode, ...] = get_args(WeightMode)
NUM_POSITIONS = 300
FAMILIES = {
    "llama": {"hidden_size": 192, "head_dim": 32},
    "gemma3_text": {"head_dim": 16, "sliding_window": 40},
    "qwen3": {"head_dim": 80, "num_attention_heads": 7, "num_key_value_heads": 1},
}
"""Dense ones with biases, windows, head norms and other groups of queries."""


def make_text(seed: int, vocab: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def forty_sizes() -> list[int]:
    sizes = [1, 1, 21, 2, 5] + [1] * 10 + [3, 16, 17, 4, 8] + [11] * 20
    sizes[-1] += NUM_POSITIONS - sum(sizes)
    assert len(sizes) == 40
    assert min(sizes) > 0
    return sizes


def assert_invariant(one: Decoder, two: Decoder, dtype: Dtype, is_full: bool) -> None:
    vocab = one.spec.vocab_size
    text = make_text(1, vocab, NUM_POSITIONS)
    others = [make_text(seed, vocab, length) for seed, length in ((2, 50), (3, 64), (4, 129))]
    expected = logits_whole(one, dtype, text)
    assert bool(expected.isfinite().all())
    assert torch.equal(logits_whole(two, dtype, text), expected)
    assert torch.equal(logits_in_pieces(two, dtype, text, forty_sizes()), expected)
    assert torch.equal(logits_in_a_batch(one, dtype, text, others), expected)
    if is_full:
        assert torch.equal(logits_in_pieces(one, dtype, text, forty_sizes()), expected)
        assert torch.equal(logits_in_a_batch(two, dtype, text, others), expected)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_tiny_models(tmp_path: Path, family: str, level: Level, mode: WeightMode, is_full: bool) -> None:
    save_tiny(family, tmp_path, **FAMILIES[family])
    one, two = (load_native(tmp_path, mode, num_threads, level) for num_threads in (1, 3))
    assert one.weights.num_bytes > 0
    for dtype in get_args(Dtype) if is_full else ("fp32" if mode == "fp32" else "bf16",):
        assert_invariant(one, two, dtype, is_full)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """SmolLM2 at the level that serves here; in full at each, of which the portable one takes minutes."""
    if metafunc.function is test_smollm2:
        levels = (None, *LEVELS) if metafunc.config.getoption("--full") else (None,)
        metafunc.parametrize(("mode", "level"), [(mode, level) for mode in MODES for level in levels])


def test_smollm2(smollm2: Path, mode: WeightMode, level: Level | None, is_full: bool) -> None:
    one, two = (load_native(smollm2, mode, num_threads, level) for num_threads in (1, 2))
    assert_invariant(one, two, "fp32" if mode == "fp32" else "bf16", is_full)
