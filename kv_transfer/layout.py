"""The shape of one replica's KV cache and of the units cut from it.

Pure arithmetic: no torch, no sockets. A token's KV state is `num_layers x 2 (K, V) x num_kv_heads x head_dim` elements;
a block holds `block_tokens` tokens of every layer; a unit on the wire is `[num_layers_in_unit, 2, num_kv_heads,
num_tokens, head_dim]`, contiguous, in the receiving cache's dtype.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from kv_transfer.codec import Between

Dtype = Literal["fp32", "bf16"]
KeyOrder = Literal["token_major", "dim_major"]
"""How K lies inside a block: [slot][dim], or [dim][slot] as the C++ kernels like it. V is always [slot][dim]."""
MIN_UNIT_BYTES = 2 << 20
MAX_UNIT_BYTES = 256 << 20
_ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What both ends of a transfer agree on; `block_tokens`, `dtype` and `keys` may differ between them."""

    num_layers: Annotated[int, Between(1, 1024)]
    num_kv_heads: Annotated[int, Between(1, 1024)]
    head_dim: Annotated[int, Between(1, 4096)]
    block_tokens: Annotated[int, Between(1, 4096)]
    dtype: Dtype
    keys: KeyOrder = "token_major"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return self.unit_bytes(1, self.num_layers)

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.block_tokens

    def unit_bytes(self, num_tokens: int, num_layers: int) -> int:
        """Bytes of `num_tokens` tokens of `num_layers` layers in this layout's dtype."""
        return num_layers * 2 * self.num_kv_heads * num_tokens * self.head_dim * _ELEMENT_BYTES[self.dtype]

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def incompatible_with(self, other: "KVLayout") -> str | None:
        """None when units of one can be written into the other, else which field differs and how."""
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} {ours} against {theirs}"
        return None


def make_model_digest(facts: Mapping[str, str]) -> str:
    """A digest of everything that makes KV caches interchangeable: weights manifest, rope and norm settings,
    quantization.

    Equal for equal mappings whatever their order; different for any other key or value.
    """
    return hashlib.sha256(json.dumps(sorted(facts.items())).encode()).hexdigest()


def plan_units(num_tokens: int, layout: KVLayout, min_unit_bytes: int = MIN_UNIT_BYTES) -> tuple[tuple[int, int], ...]:
    """(first_layer, num_layers) groups that cover a chunk's layers in order.

    Groups are as many as possible with at least `min_unit_bytes` each, and equal within one layer; one group when the
    whole chunk is smaller. 2,048 tokens of a 70B layer (8 heads x 128, bf16) are 8 MiB, so each layer is a unit of its
    own.
    """
    assert num_tokens > 0, f"a chunk of {num_tokens} tokens has no units"
    smallest_group = -(-min_unit_bytes // layout.unit_bytes(num_tokens, 1))
    num_groups = max(1, layout.num_layers // max(1, smallest_group))
    edges = [layout.num_layers * g // num_groups for g in range(num_groups + 1)]
    return tuple((low, high - low) for low, high in itertools.pairwise(edges))
