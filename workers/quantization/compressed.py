"""The integer layouts of compressed-tensors (`compressors`, `pack_to_int32`); its fp8 is in `fp8.py`.

"pack-quantized", 4 or 8 bits:

    weight_packed      int32 [N, K * bits / 32]   word i of a row holds inputs i * 32 / bits and up, lowest bits first
    weight_scale       float [N, S]
    weight_zero_point  int32 [N * bits / 32, S]   packed along N; only where the scheme is not symmetric
    weight_g_idx       int   [K]                  group of each input; only with `actorder` "group"
    weight_shape       int   [2]                  N and K

Packed numbers are signed ones moved up by 2 ** (bits - 1), zero points too, so that their difference is as stored; a
symmetric scheme has its zero there. "int-quantized", 8 bits: `weight` int8 [N, K], `weight_scale` float [N, S] and
`weight_zero_point` int8 of the same shape, none of them moved.

w = weight_scale * (q - zero).
"""

import torch
from torch import Tensor

from workers.quantization.groups import GroupGrid, simplify_groups
from workers.quantization.words import unpack_words


def unpack_packed(
    packed: Tensor, scale_NS: Tensor, zeros: Tensor | None, g_idx: Tensor | None, bits: int, width: int
) -> GroupGrid:
    """The grid of a "pack-quantized" matrix of `width` inputs; entries of `g_idx` are below S."""
    num_rows, num_groups = scale_NS.shape
    if zeros is None:
        zero_NS = torch.full((num_rows, num_groups), 1 << (bits - 1), dtype=torch.int16)
    else:
        zero_NS = unpack_words(zeros.T.contiguous(), bits)[:, :num_rows].T.to(torch.int16).contiguous()
    group_of_K = None if g_idx is None else simplify_groups(g_idx, num_groups)
    return GroupGrid(unpack_words(packed, bits)[:, :width], scale_NS.float(), zero_NS, bits, group_of_K)


def unpack_int8(weight_NK: Tensor, scale_NS: Tensor, zero_NS: Tensor | None) -> GroupGrid:
    """The grid of an "int-quantized" matrix."""
    zero_NS = torch.zeros(scale_NS.shape, dtype=torch.int16) if zero_NS is None else zero_NS.to(torch.int16)
    return GroupGrid(weight_NK, scale_NS.float(), zero_NS, 8)
