"""Eight bits: weights per row or per group of 32, and the rounding of activations that every backend agrees on.

Shapes: N rows, K inputs, G = K / 32 groups, T tokens.
"""

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale; K is a multiple of it wherever groups are used."""

TINY = 1e-30
"""A group of activations whose largest magnitude is below it counts as zeros (127 / m would be infinite)."""


def quantize_rows(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(q_NK int8, scale_N float32): w is about scale * q with scale = max |w| / 127 of the row, rounded to nearest."""
    w_NK = w_NK.float()
    scale_N = w_NK.abs().amax(dim=1) / 127
    q_NK = (w_NK / _divisor(scale_N)[:, None]).round_().clamp_(-127, 127)
    return q_NK.to(torch.int8), scale_N


def quantize_groups(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(q_NK int8, scale_NG float16) on GGUF's Q8_0 grid; weights that lie on such a grid come back exactly."""
    w_NGg = group(w_NK.float())
    scale_NG = (w_NGg.abs().amax(dim=2) / 127).to(torch.float16)
    q_NGg = (w_NGg / _divisor(scale_NG.float())[..., None]).round_().clamp_(-128, 127)
    return q_NGg.flatten(1).to(torch.int8), scale_NG


def dequantize_rows(q_NK: Tensor, scale_N: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return q_NK.to(dtype) * scale_N.to(dtype)[:, None]


def dequantize_groups(q_NK: Tensor, scale_NG: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (group(q_NK.to(dtype)) * scale_NG.to(dtype)[..., None]).flatten(1)


def round_inputs(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(q_TK int8, scale_TG float32) of activations, as `Ops.linear` defines it: all in float32, halves to even."""
    x_TGg = group(x_TK.float())
    max_TG = x_TGg.abs().amax(dim=2)
    inverse_TG = torch.where(max_TG < TINY, 0.0, 127 / max_TG)
    q_TGg = (x_TGg * inverse_TG[..., None]).round_()
    return q_TGg.flatten(1).to(torch.int8), max_TG / 127


def group(x_NK: Tensor) -> Tensor:
    """`[N, K / 32, 32]`."""
    return x_NK.reshape(x_NK.shape[0], x_NK.shape[1] // GROUP, GROUP)


def _divisor(scale: Tensor) -> Tensor:
    """Where the scale is 0 the weights are 0, or too small for a float16: they become 0."""
    return torch.where(scale == 0, torch.inf, scale)
