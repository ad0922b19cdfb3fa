"""Eight-bit floats, e4m3 without infinities, that share a scale by blocks: w = scale * q.

DeepSeek-V3 and Qwen3-FP8 store `weight` [N, K] and `weight_scale_inv` float [ceil(N / 128), ceil(K / 128)]; in spite of
its name it multiplies (`weight_dequant` in DeepSeek-V3's `inference/kernel.py`). compressed-tensors stores
`weight_scale` [1] of a tensor, [N, 1] of rows, or of blocks as above. All are blocks here: of the whole matrix, of one
row, or of 128 by 128; those at the edges may be smaller.
"""

from torch import Tensor


def dequantize_blocks(q_NK: Tensor, scale_AB: Tensor, block: tuple[int, int]) -> Tensor:
    """`[N, K]` float32; `scale_AB` is `[ceil(N / block[0]), ceil(K / block[1])]`."""
    num_rows, width = q_NK.shape
    scale_NB = scale_AB.float().repeat_interleave(block[0], dim=0)[:num_rows]
    return q_NK.float().mul_(scale_NB.repeat_interleave(block[1], dim=1)[:, :width])
