"""The paged KV cache of one rank. Knows its shape and device; which block belongs to whom is the block pool's."""

import math

import numpy as np
import torch

from kv_transfer.layout import KVLayout

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PagedKVCache:
    """`data` is `[num_layers, num_blocks, 2 (K, V), num_kv_heads, block_tokens, head_dim]`, zeroed, and never moves."""

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu", has_scratch: bool = False
    ) -> None:
        """`has_scratch`: one block more, which no pool hands out: rows of padding write there."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks if has_scratch else None
        shape = (
            layout.num_layers,
            num_blocks + has_scratch,
            2,
            layout.num_kv_heads,
            layout.block_tokens,
            layout.head_dim,
        )
        # A block never written holds no NaN that a mask would not hide.
        self.data = _zeros(shape, TORCH_DTYPES[layout.dtype], torch.device(device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that cost memory when first written: numpy takes them from calloc, torch writes every page (measured)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
