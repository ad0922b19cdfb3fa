"""Attention over a paged KV cache for a flat batch without padding: write this step's K and V, then attend by block
table.

Knows torch and the cache's shape. Knows no request, no scheduler, no model class. Everything a step needs travels in
`StepFacts`, so two steps of two models never meet in a global.

Shapes: T tokens of the step, H query heads, K key-value heads, D head_dim, B blocks, S block_tokens, C context of one
request. The cache of one layer is `[B, 2, K, S, D]`, seen as B * 2 * K rows of S * D contiguous numbers: one gathered
row is one head of one block, so a whole context is one `index_select` (3x the speed of indexing by block and
permuting).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.ops.base import StepTables


@dataclass(slots=True)
class StepFacts:
    """What attention needs of one step; made by `runner/batch.py`."""

    data: Tensor
    """The cache `[layers_per_group, B, 2, K, S, D]`."""
    tables: tuple[StepTables, ...]
    """One per state group; their spans are the same."""
    places: tuple[tuple[int, int], ...]
    """Of each layer its group and its index in the group's blocks."""
    on_layer: Callable[[int], None]
    rows: dict[int, Tensor] = field(default_factory=dict)
    """By group: made by the first layer that gathers, used by all."""
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)
    """By (span, window): made by the first layer that needs one, used by all."""

    def of_layer(self, layer: int) -> tuple[StepTables, Tensor]:
        """The layer's tables and its cache `[B, 2, K, S, D]`."""
        group, index = self.places[layer]
        return self.tables[group], self.data[index]


def write_kv(facts: StepFacts, layer: int, key_KTD: Tensor, value_KTD: Tensor) -> None:
    """Put this step's K and V of one layer into its blocks, in the cache's dtype, and report the layer as written."""
    tables, cache_B2KSD = facts.of_layer(layer)
    layer_BSxKD = cache_B2KSD.permute(0, 3, 1, 2, 4)
    fresh_TxKD = torch.stack((key_KTD, value_KTD)).permute(2, 0, 1, 3).to(facts.data.dtype)
    layer_BSxKD[tables.block_of_T, tables.slot_of_T] = fresh_TxKD
    facts.on_layer(layer)


def attend(facts: StepFacts, layer: int, query_HTD: Tensor, scale: float, window: int | None = None) -> Tensor:
    """`[T, H, D]`: each token attends to its own request's tokens up to itself, at most `window` of them (itself
    included).
    """
    _, num_blocks, _, kv_heads, block_tokens, head_dim = facts.data.shape
    tables, cache_B2KSD = facts.of_layer(layer)
    rows = cache_B2KSD.view(num_blocks * 2 * kv_heads, block_tokens * head_dim)
    gathered = rows.index_select(0, _rows_of(facts, facts.places[layer][0])).to(query_HTD.dtype)
    heads, num_tokens, _ = query_HTD.shape
    out_THD = query_HTD.new_empty((num_tokens, heads, head_dim))
    for index, span in enumerate(tables.spans):
        first, count = 2 * kv_heads * span.first_entry, 2 * kv_heads * span.num_blocks
        cached = gathered[first : first + count].view(2, kv_heads, span.num_blocks * block_tokens, head_dim)
        tokens = slice(span.first_row, span.first_row + span.num_tokens)
        query_HtD = query_HTD[:, tokens]
        if span.num_tokens == 1:
            out_THD[tokens] = _attend_one(query_HtD, cached[:, :, : span.context], scale, window)
        else:
            mask = _mask_of(facts, index, window)
            out_THD[tokens] = _attend_many(query_HtD, cached[:, :, : span.context], scale, mask)
    return out_THD


def _rows_of(facts: StepFacts, group: int) -> Tensor:
    """Rows of one layer, span by span: `[2, K, num_blocks]` flattened for each. Where a window slid past any block
    does: nothing of it is seen.
    """
    rows = facts.rows.get(group)
    if rows is None:
        tables, heads = facts.tables[group], 2 * facts.data.shape[3]
        first_row_X = tables.table_X.clamp(min=0) * heads
        heads_x1 = torch.arange(heads, device=first_row_X.device)[:, None]
        parts = torch.split(first_row_X, [span.num_blocks for span in tables.spans])
        rows = facts.rows[group] = torch.cat([(heads_x1 + part_N[None]).view(-1) for part_N in parts])
    return rows


def _attend_one(query_H1D: Tensor, cached_xKCD: Tensor, scale: float, window: int | None) -> Tensor:
    """One new token. The query heads that share a KV head stand as rows of one small matrix: K is read once."""
    if window is not None:
        cached_xKCD = cached_xKCD[:, :, -window:]
    kv_heads, head_dim = cached_xKCD.shape[1], cached_xKCD.shape[3]
    query_1KGD = query_H1D.reshape(1, kv_heads, -1, head_dim)
    out_1KGD = scaled_dot_product_attention(query_1KGD, cached_xKCD[:1], cached_xKCD[1:], scale=scale)
    return out_1KGD.reshape(1, -1, head_dim)


def _attend_many(query_HtD: Tensor, cached_xKCD: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """A chunk of a prompt; without a mask it is the whole context and plainly causal."""
    heads, num_tokens, head_dim = query_HtD.shape
    kv_heads = cached_xKCD.shape[1]
    query_KGtD = query_HtD.reshape(kv_heads, heads // kv_heads, num_tokens, head_dim)
    key_KGCD, value_KGCD = cached_xKCD[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1)
    out_KGtD = scaled_dot_product_attention(
        query_KGtD, key_KGCD, value_KGCD, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out_KGtD.reshape(heads, num_tokens, head_dim).transpose(0, 1)


def _mask_of(facts: StepFacts, index: int, window: int | None) -> Tensor | None:
    span = facts.tables[0].spans[index]
    if window is not None and window >= span.context:
        window = None
    if span.first_position == 0 and window is None:
        return None
    mask = facts.masks.get((index, window))
    if mask is None:
        position_t = torch.arange(span.first_position, span.context, device=facts.data.device)[:, None]
        position_C = torch.arange(span.context, device=facts.data.device)[None]
        mask = position_C <= position_t
        if window is not None:
            mask &= position_C > position_t - window
        facts.masks[index, window] = mask
    return mask
