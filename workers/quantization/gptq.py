"""GPTQ's layout, of 4 or 8 bits, as AutoGPTQ and GPTQModel write it (`qlinear` modules, `QuantizeConfig`).

    qweight  int32 [K * bits / 32, N]   word i of a column holds inputs i * 32 / bits and up of a row, lowest bits first
    qzeros   int32 [S, N * bits / 32]   the same along N
    scales   float [S, N]
    g_idx    int   [K]                  group of each input; in any order where `desc_act` (act-order) is on

w = scales * (q - zero). Version 1 ("gptq") stores zero - 1: GPTQModel's `convert_gptq_v2_to_v1_format` takes 1 in each
place off the whole word, and so a zero of 0 borrows from its neighbour; whole words are added here too. "gptq_v2"
stores zero. Both formats store q itself.
"""

import torch
from torch import Tensor

from workers.quantization.groups import GroupGrid, simplify_groups
from workers.quantization.words import unpack_words


def unpack_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, is_v1: bool
) -> GroupGrid:
    """The grid of tensors of those shapes; K is a multiple of 32 / bits, entries of `g_idx` are below S."""
    num_groups, num_rows = scales.shape
    if is_v1:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        qzeros = (qzeros.to(torch.int64) + ones) & 0xFFFFFFFF
    zero_SN = unpack_words(qzeros, bits)[:, :num_rows]
    return GroupGrid(
        q_NK=unpack_words(qweight.T.contiguous(), bits),
        scale_NS=scales.float().T.contiguous(),
        zero_NS=zero_SN.T.to(torch.int16).contiguous(),
        bits=bits,
        group_of_K=None if g_idx is None else simplify_groups(g_idx, num_groups),
    )
