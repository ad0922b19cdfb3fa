"""The grids against the gguf package and against their own promises."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from workers.quantization import int4, int8


def random_weight(seed: int, rows: int = 5, width: int = 96, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def test_nibbles_lie_as_in_the_file() -> None:
    q_NK = torch.arange(64).reshape(1, 64).to(torch.uint8) % 16
    packed = int4.pack_nibbles(q_NK)
    assert packed.shape == (1, 32)
    assert packed[0, 3] == 3 | (3 << 4), "inputs 3 and 19 share byte 3"
    assert torch.equal(int4.unpack_nibbles(packed), q_NK)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_four_bits_read_like_gguf(scale: float) -> None:
    blocks = quantize(random_weight(1, scale=scale).numpy(), GGMLQuantizationType.Q4_1)
    groups = blocks.reshape(5, 3, 20)
    halves = torch.from_numpy(groups[:, :, :4].copy().view(np.float16))
    q_NP = torch.from_numpy(np.ascontiguousarray(groups[:, :, 4:]).reshape(5, 48))
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q4_1))
    found = int4.dequantize_groups(q_NP, halves[:, :, 0], halves[:, :, 1])
    assert torch.equal(found, expected)
    assert torch.equal(int4.dequantize_groups(*int4.quantize_groups(expected)), expected), "a grid comes back exactly"


def test_eight_bits_per_group_read_like_gguf() -> None:
    blocks = quantize(random_weight(2).numpy(), GGMLQuantizationType.Q8_0)
    expected = torch.from_numpy(dequantize(blocks, GGMLQuantizationType.Q8_0))
    assert torch.equal(int8.dequantize_groups(*int8.quantize_groups(expected)), expected)


@given(st.integers(0, 10_000), st.sampled_from([1e-2, 1.0, 100.0]))
def test_no_weight_moves_further_than_its_step(seed: int, scale: float) -> None:
    """Half a step of rounding, and what float16 does to the ends of the range."""
    w_NK = random_weight(seed, scale=scale)
    groups = int8.group(w_NK)
    spread = groups.amax(2) - groups.amin(2)
    error = int8.group((int4.dequantize_groups(*int4.quantize_groups(w_NK)) - w_NK).abs()).amax(2)
    assert bool((error <= spread / 15 * 0.51 + 2e-3 * groups.abs().amax(2)).all())
    error = int8.group((int8.dequantize_groups(*int8.quantize_groups(w_NK)) - w_NK).abs()).amax(2)
    assert bool((error <= groups.abs().amax(2) / 127 * 0.6).all())
    error = (int8.dequantize_rows(*int8.quantize_rows(w_NK)) - w_NK).abs().amax(1)
    assert bool((error <= w_NK.abs().amax(1) / 127 * 0.501).all())


def test_zeros_and_constants_are_exact() -> None:
    for value in (0.0, 1.5, -2.0):
        w_NK = torch.full((2, 64), value)
        assert torch.equal(int4.dequantize_groups(*int4.quantize_groups(w_NK)), w_NK)
    zeros = torch.zeros(2, 64)
    for grid in (
        int8.dequantize_groups(*int8.quantize_groups(zeros)),
        int8.dequantize_rows(*int8.quantize_rows(zeros)),
    ):
        assert torch.equal(grid, zeros)


def test_inputs_round_halves_to_even_and_nothing_to_zero() -> None:
    x_TK = torch.zeros(3, 64)
    x_TK[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x_TK[1] = 1e-31
    x_TK[2, 32:] = 1e-20
    q_TK, scale_TG = int8.round_inputs(x_TK)
    assert q_TK[0, :4].tolist() == [127, 0, 2, -2]
    assert scale_TG[0].tolist() == [1.0, 0.0]
    assert not q_TK[1].any()
    assert q_TK[2].tolist() == [0] * 32 + [127] * 32
    assert q_TK.dtype == torch.int8
