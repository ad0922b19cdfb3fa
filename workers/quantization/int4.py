"""Four bits: GGUF's Q4_1 grid, w = scale * q + min with q from 0 to 15 and float16 scale and min per group of 32.

Shapes: N rows, K inputs, G = K / 32 groups, P = K / 2 bytes. Byte b of a group holds input b in its low half and input
16 + b in its high half, as in the file.
"""

import torch
from torch import Tensor

from workers.quantization.int8 import GROUP, group

_HALF = GROUP // 2


def quantize_groups(w_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q_NP uint8, scale_NG, min_NG): from the group's least to its largest weight, rounded to nearest.

    Weights that lie on such a grid and use its ends come back exactly: the least is min, and the largest gives scale.
    """
    w_NGg = group(w_NK.float())
    low_NG, high_NG = w_NGg.aminmax(dim=2)
    min_NG = low_NG.to(torch.float16)
    scale_NG = ((high_NG - low_NG) / 15).to(torch.float16)
    divisor_NG = torch.where(scale_NG == 0, torch.inf, scale_NG.float())
    q_NGg = ((w_NGg - min_NG.float()[..., None]) / divisor_NG[..., None]).round_().clamp_(0, 15)
    return pack_nibbles(q_NGg.flatten(1).to(torch.uint8)), scale_NG, min_NG


def pack_nibbles(q_NK: Tensor) -> Tensor:
    """`[N, K]` numbers from 0 to 15 as `[N, K / 2]` bytes."""
    low_high = q_NK.reshape(q_NK.shape[0], -1, 2, _HALF)
    return (low_high[:, :, 0] | (low_high[:, :, 1] << 4)).flatten(1)


def unpack_nibbles(q_NP: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    bytes_NGh = q_NP.reshape(q_NP.shape[0], -1, _HALF)
    return torch.stack((bytes_NGh & 15, bytes_NGh >> 4), dim=2).flatten(1)


def dequantize_groups(q_NP: Tensor, scale_NG: Tensor, min_NG: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[N, K]`; in float32 the numbers that the `gguf` package gives for the same bytes."""
    q_NGg = group(unpack_nibbles(q_NP).to(dtype))
    return (q_NGg * scale_NG.to(dtype)[..., None] + min_NG.to(dtype)[..., None]).flatten(1)
