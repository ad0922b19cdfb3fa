"""AWQ's layout of version "gemm", 4 bits, as AutoAWQ writes it (`WQLinear_GEMM.from_linear`).

    qweight  int32 [K, N / 8]   bits 4 i and up of a word hold row 8 w + ORDER[i]
    qzeros   int32 [S, N / 8]   in the same order
    scales   float [S, N]

w = scales * (q - zero).
"""

import torch
from torch import Tensor

from workers.quantization.groups import GroupGrid
from workers.quantization.words import unpack_words

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> GroupGrid:
    """The grid of tensors of those shapes; N is a multiple of 8."""
    return GroupGrid(
        q_NK=unpack_words(qweight, 4, ORDER).T.contiguous(),
        scale_NS=scales.float().T.contiguous(),
        zero_NS=unpack_words(qzeros, 4, ORDER).T.to(torch.int16).contiguous(),
        bits=4,
    )
