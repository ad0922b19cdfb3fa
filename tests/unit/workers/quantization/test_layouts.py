"""The layouts of quantized checkpoints, word by word; whole folders in every layout are in `unit/workers/model`."""

import numpy as np
import torch

from tests.support.quantized_folders import make_grid
from workers.quantization import int4
from workers.quantization.awq import unpack_awq
from workers.quantization.compressed import unpack_int8, unpack_packed
from workers.quantization.fp8 import dequantize_blocks
from workers.quantization.gptq import unpack_gptq
from workers.quantization.groups import GroupGrid, simplify_groups
from workers.quantization.words import unpack_words


def words(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32))


def test_the_lowest_bits_come_first() -> None:
    assert unpack_words(words(0xF7654321)[None], 4).tolist() == [[1, 2, 3, 4, 5, 6, 7, 15]]
    assert unpack_words(words(0xFF030201)[None], 8).tolist() == [[1, 2, 3, 255]]


def test_gptq_packs_weights_down_and_zeros_across() -> None:
    qweight = torch.stack([words(0x76543210)] * 7 + [words(0xFEDCBA98)], dim=1)  # [K / 8, N]
    scales = torch.ones(1, 8, dtype=torch.float16)
    v2 = unpack_gptq(qweight, words(0x76543210)[None], scales, None, 4, is_v1=False)
    assert v2.q_NK[0].tolist() == list(range(8))
    assert v2.q_NK[7].tolist() == list(range(8, 16))
    assert v2.zero_NS[:, 0].tolist() == list(range(8))
    v1 = unpack_gptq(qweight, words(0x76543210)[None], scales, None, 4, is_v1=True)
    assert v1.zero_NS[:, 0].tolist() == list(range(1, 9))


def test_gptq_v1_zeros_of_nothing_borrow_and_give_back() -> None:
    """0, 5, 0, 3, ... less one each, taken off the whole word."""
    zeros = (0x00000350 - 0x11111111) & 0xFFFFFFFF
    grid = unpack_gptq(words(0)[None].expand(1, 8), words(zeros)[None], torch.ones(1, 8), None, 4, is_v1=True)
    assert grid.zero_NS[:, 0].tolist() == [0, 5, 3, 0, 0, 0, 0, 0]


def test_awq_interleaves_rows() -> None:
    word = words(0x75316420)[None]  # bits 4 i and up hold row ORDER[i]: 0 2 4 6 1 3 5 7
    grid = unpack_awq(word.expand(8, 1), word, torch.ones(1, 8))
    assert grid.q_NK[:, 3].tolist() == list(range(8))
    assert grid.zero_NS[:, 0].tolist() == list(range(8))


def test_compressed_tensors_pack_zero_points_down() -> None:
    scale = torch.ones(3, 1, dtype=torch.bfloat16)
    packed = words(0x76543210, 0x00000098).expand(3, 2)
    grid = unpack_packed(packed, scale, words(0x00000321)[None], None, 4, 10)
    assert grid.q_NK[1].tolist() == list(range(10)), "what pads a word is no input"
    assert grid.zero_NS[:, 0].tolist() == [1, 2, 3]
    assert unpack_packed(packed, scale, None, None, 4, 10).zero_NS[:, 0].tolist() == [8, 8, 8]


def test_eight_bit_floats_multiply_by_their_blocks() -> None:
    q = torch.tensor([[1.0, 2.0, 448.0], [-1.0, 0.5, 8.0], [1.0, 1.0, 1.0]]).to(torch.float8_e4m3fn)
    dense = dequantize_blocks(q, torch.tensor([[1.0, 10.0], [2.0, 20.0]]), (2, 2))
    assert dense.tolist() == [[1, 2, 4480], [-1, 0.5, 80], [2, 2, 20]]


def test_an_index_in_order_is_no_act_order() -> None:
    assert simplify_groups(torch.tensor([0, 0, 1, 1], dtype=torch.int32), 2) is None
    found = simplify_groups(torch.tensor([0, 1, 1, 0], dtype=torch.int32), 2)
    assert found is not None
    assert simplify_groups(torch.tensor([0, 0, 0, 1]), 2) is not None, "unequal shares"


def grid_of(size: int | None, bits: int = 4, scale: float = 1.0) -> GroupGrid:
    made = make_grid(np.random.default_rng(3), 5, 128, bits, size)
    q, zero = torch.from_numpy(made.q_NK).to(torch.uint8), torch.from_numpy(made.zero_NS).to(torch.int16)
    return GroupGrid(q, made.scale_NS.float() * scale, zero, bits)


def test_four_bits_keep_their_numbers_and_move_by_float16_only() -> None:
    for size in (32, 64, 128, None):
        grid = grid_of(size)
        fit = grid.fit_q4()
        assert fit is not None
        assert torch.equal(int4.unpack_nibbles(fit[0]), grid.q_NK)
        scale = grid.scale_NS.repeat_interleave(128 // grid.scale_NS.shape[1], dim=1)
        error = (int4.dequantize_groups(*fit) - grid.dequantize()).abs()
        assert bool((error <= scale * 15 * 2.0**-11).all()), "what rounding -zero * scale to float16 does"


def test_what_does_not_fit_is_not_offered() -> None:
    assert grid_of(16).fit_q4() is None, "two scales in a group of 32"
    assert grid_of(32, bits=8).fit_q4() is None
    for scale in (1e6, 1e-7):
        assert grid_of(32, scale=scale).fit_q4() is None, "outside float16"
    grid = grid_of(32)
    shuffled = GroupGrid(grid.q_NK, grid.scale_NS, grid.zero_NS, 4, torch.arange(128) % 4)
    assert shuffled.fit_q4() is None
    assert grid.fit_rows() is None


def test_rows_of_eight_bits_are_the_same_products() -> None:
    q = torch.arange(-128, 128).to(torch.int8).reshape(2, 128)
    grid = unpack_int8(q, torch.tensor([[0.5], [0.25]]), None)
    fit = grid.fit_rows()
    assert fit is not None
    assert torch.equal(fit[0], q)
    assert torch.equal(fit[0].float() * fit[1][:, None], grid.dequantize())
    moved = unpack_int8(q, torch.tensor([[0.5], [0.25]]), torch.tensor([[0], [1]], dtype=torch.int8))
    assert moved.fit_rows() is not None
    assert unpack_int8(q, torch.ones(2, 1), torch.tensor([[1], [0]], dtype=torch.int8)).fit_rows() is None
