"""The paged KV cache of one rank. Knows its shape and device; which block belongs to whom is the block pool's."""

import torch

from kv_transfer.layout import KVLayout

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PagedKVCache:
    """`data` is `[num_layers, num_blocks, 2 (K, V), num_kv_heads, block_tokens, head_dim]`, zeroed, and never moves."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
        # Zeros cost nothing until touched, and a block never written holds no NaN that a mask would not hide.
        self.data = torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device)
