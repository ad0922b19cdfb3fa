"""The paged KV cache of one rank. Knows its shape and device; which block belongs to whom is the block pool's."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kv_transfer.layout import Dtype, KeyOrder, KVLayout, LayerGroup
from workers.engine.state import StateSpec, plan_groups
from workers.model.arch import DecoderSpec

Allocate = Callable[[int], NDArray[np.uint8]]
"""Zeroed memory of so many bytes, on the CPU."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PagedKVCache:
    """`data` is `[layers_per_group, num_blocks, 2 (K, V), num_kv_heads, block_tokens, head_dim]`, zeroed, and never
    moves.

    A layer's place is `layout.places[layer]`: its group, whose tables name the block, and its index in the block.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: torch.device | str = "cpu", has_scratch: bool = False,
        allocate: Allocate | None = None,
    ) -> None:  # fmt: skip
        """`has_scratch`: one block more, which no pool hands out: rows of padding write there. `allocate` is asked for
        the memory of a cache on the CPU."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks if has_scratch else None
        # A block never written holds no NaN that a mask would not hide.
        shape, dtype = layout.cache_shape(num_blocks + has_scratch), TORCH_DTYPES[layout.dtype]
        if torch.device(device).type == "cpu":
            memory = (allocate or _allocate)(math.prod(shape) * dtype.itemsize)
            self.data = torch.from_numpy(memory).view(dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)


def plan_layout(
    spec: DecoderSpec, state: Sequence[StateSpec], block_tokens: int, dtype: Dtype, keys: KeyOrder = "token_major"
) -> KVLayout:
    """The layout of a cache for layers that keep `state`. Raises `ModelRefused` for state that is not served."""
    groups = tuple(LayerGroup(group.layers, group.spec.window) for group in plan_groups(state))
    return KVLayout(spec.num_layers, state[0].tp_shards, spec.head_dim, block_tokens, dtype, keys, groups)


def _allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that cost memory when first written: numpy takes them from calloc, torch writes every page (measured)."""
    return np.zeros(num_bytes, np.uint8)
