"""The grid that GPTQ, AWQ and compressed-tensors share, and what of it fits the grids that the op set computes with.

Shapes: N rows, K inputs, S scales of a row, G = K / 32 groups of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.quantization.int4 import pack_nibbles
from workers.quantization.int8 import GROUP

_HALF_ULP = 2.0**-11
"""What rounding to float16 moves a number by at most, relative to it, outside its subnormal numbers."""


@dataclass(frozen=True, slots=True)
class GroupGrid:
    """w[n, k] = scale[n, s] * (q[n, k] - zero[n, s]), in float32, with s = group_of[k].

    Without `group_of_K` inputs share scales in order, K / S of them each; S divides K.
    """

    q_NK: Tensor
    """uint8 or int8."""
    scale_NS: Tensor
    """float32."""
    zero_NS: Tensor
    """int16."""
    bits: int
    group_of_K: Tensor | None = None

    def dequantize(self) -> Tensor:
        """`[N, K]` float32: the difference is exact, the product rounded once."""
        if self.group_of_K is not None:
            zero_NK, scale_NK = self.zero_NS[:, self.group_of_K], self.scale_NS[:, self.group_of_K]
            return (self.q_NK.float() - zero_NK).mul_(scale_NK)
        q_NSs = self.q_NK.float().reshape(*self.scale_NS.shape, -1)
        return (q_NSs - self.zero_NS[..., None]).mul_(self.scale_NS[..., None]).flatten(1)

    def fit_q4(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(q_NP, scale_NG, min_NG) of the grid of `int4.py`, every q as it is; None where it does not fit.

        It fits where q is 0 to 15, neighbours share scales by a multiple of 32, and scale and min = -zero * scale are
        within float16: each is then off by its rounding at most.
        """
        num_groups, rest = divmod(self.q_NK.shape[1], GROUP)
        if self.bits != 4 or self.group_of_K is not None or rest or num_groups % self.scale_NS.shape[1]:
            return None
        min_NS = -self.zero_NS * self.scale_NS
        if not (_is_within_half(self.scale_NS) and _is_within_half(min_NS)):
            return None
        repeat = num_groups // self.scale_NS.shape[1]
        scale_NG, min_NG = (x.to(torch.float16).repeat_interleave(repeat, dim=1) for x in (self.scale_NS, min_NS))
        return pack_nibbles(self.q_NK), scale_NG, min_NG

    def fit_rows(self) -> tuple[Tensor, Tensor] | None:
        """(q_NK int8, scale_N float32) with the same products; None unless a row has one scale and q - zero fits."""
        if self.scale_NS.shape[1] != 1:
            return None
        moved_NK = self.q_NK.to(torch.int16) - self.zero_NS
        low, high = moved_NK.aminmax()
        return None if low < -128 or high > 127 else (moved_NK.to(torch.int8), self.scale_NS[:, 0].contiguous())


def simplify_groups(group_of_K: Tensor, num_groups: int) -> Tensor | None:
    """None where the inputs take their groups in order and in equal shares, else the index as int64."""
    share, rest = divmod(len(group_of_K), num_groups)
    in_order = not rest and torch.equal(group_of_K.long(), torch.arange(num_groups).repeat_interleave(share))
    return None if in_order else group_of_K.long()


def _is_within_half(x: Tensor) -> bool:
    return bool(((x.to(torch.float16).float() - x).abs() <= _HALF_ULP * x.abs()).all())
