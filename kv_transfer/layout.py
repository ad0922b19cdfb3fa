"""The shape of one replica's KV cache and of the units cut from it.

Pure arithmetic: no torch, no sockets. A token's KV state is `num_layers x 2 (K, V) x num_kv_heads x head_dim` elements;
a unit on the wire is `[num_layers_in_unit, 2, num_kv_heads, num_tokens, head_dim]`, contiguous, in the receiving
cache's dtype.

Layers form groups. A group has one block table per request, a block holds `block_tokens` tokens of the layers of one
group, and all groups take their blocks from one pool, because all blocks are equally large. A table says NULL_BLOCK
where a group with a window holds nothing any more.

    cache   [layers_per_group, num_blocks, 2, num_kv_heads, block_tokens, head_dim]     layer l lies at places[l]
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from kv_transfer.codec import Between, Size

Dtype = Literal["fp32", "bf16"]
KeyOrder = Literal["token_major", "dim_major"]
"""How K lies inside a block: [slot][dim], or [dim][slot] as the C++ kernels like it. V is always [slot][dim]."""
NULL_BLOCK = -1
"""In a block table: no block, because no later token sees the page."""
MIN_UNIT_BYTES = 2 << 20
MAX_UNIT_BYTES = 256 << 20
ELEMENT_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table per request."""

    layers: Annotated[tuple[Annotated[int, Between(0, 1023)], ...], Size(1, 1024)]
    window: Annotated[int, Between(1, 1 << 31)] | None = None
    """Latest tokens that a token sees, itself included; None: all."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What both ends of a transfer agree on; `dtype` and `keys` may differ between them, and `block_tokens` where no
    layer has a window."""

    num_layers: Annotated[int, Between(1, 1024)]
    num_kv_heads: Annotated[int, Between(1, 1024)]
    head_dim: Annotated[int, Between(1, 4096)]
    block_tokens: Annotated[int, Between(1, 4096)]
    dtype: Dtype
    keys: KeyOrder = "token_major"
    groups: Annotated[tuple[LayerGroup, ...], Size(0, 1024)] = ()
    """Each layer in one of them; none given: one group of all layers without a window."""

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return self.groups or (LayerGroup(tuple(range(self.num_layers))),)

    @property
    def layers_per_group(self) -> int:
        """Layers in a block; a smaller group leaves the rest of its blocks unused."""
        return max(len(group.layers) for group in self.layer_groups)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer its group and its index in the group's blocks."""
        return _places_of(self)

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Of the tensor that holds `num_blocks` blocks."""
        return (self.layers_per_group, num_blocks, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return self.unit_bytes(1, self.num_layers)

    @property
    def block_bytes(self) -> int:
        return self.unit_bytes(self.block_tokens, self.layers_per_group)

    def unit_bytes(self, num_tokens: int, num_layers: int) -> int:
        """Bytes of `num_tokens` tokens of `num_layers` layers in this layout's dtype."""
        return num_layers * 2 * self.num_kv_heads * num_tokens * self.head_dim * ELEMENT_BYTES[self.dtype]

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def incompatible_with(self, other: "KVLayout") -> str | None:
        """None when units of one can be written into the other, else which field differs and how."""
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{field} {ours} against {theirs}"
        if self.layer_groups != other.layer_groups:
            return f"groups {_describe(self.layer_groups)} against {_describe(other.layer_groups)}"
        if self.block_tokens != other.block_tokens and any(group.window for group in self.layer_groups):
            # What slid out at one end would end within a block of the other, which may hold it for a cached prefix.
            return f"block_tokens {self.block_tokens} against {other.block_tokens}, where layers have windows"
        return None


@functools.cache
def _places_of(layout: KVLayout) -> tuple[tuple[int, int], ...]:
    places = {layer: (g, i) for g, group in enumerate(layout.layer_groups) for i, layer in enumerate(group.layers)}
    assert sorted(places) == list(range(layout.num_layers)), (
        f"groups {layout.groups} are not {layout.num_layers} layers"
    )
    return tuple(places[layer] for layer in range(layout.num_layers))


def _describe(groups: tuple[LayerGroup, ...]) -> str:
    """At most 48 characters: a refusal has 128."""
    return ",".join(f"{len(group.layers)}x{group.window or 'all'}" for group in groups)[:48]


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
