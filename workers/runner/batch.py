"""A step plan to the tensors of one flat batch: every token of every chunk once, no padding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.plan import StepPlan
from workers.model.paged_attention import StepFacts
from workers.ops.base import Span, StepTables
from workers.runner.kv_cache import PagedKVCache
from workers.sampling.adjust import NO_HISTORY, History
from workers.sampling.sampler import Draw


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of the step, R rows that are sampled."""

    ids_T: Tensor
    positions_T: Tensor
    rows_R: Tensor
    """Rows of the flat batch whose logits are wanted."""
    sampled_chunks: tuple[int, ...]
    """The chunk of the plan that each of them belongs to."""
    draws: tuple[Draw, ...]
    facts: StepFacts


def make_batch(plan: StepPlan, cache: PagedKVCache, on_layer: Callable[[int], None]) -> Batch:
    """The tensors of `plan` on the cache's device; plain lists first, because a small tensor costs more than a list."""
    layout, device = cache.layout, cache.data.device
    block_tokens = layout.block_tokens
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    num_entries = 0
    for chunk in plan.chunks:
        first, end = chunk.first_position, chunk.first_position + len(chunk.tokens)
        num_blocks = -(-end // block_tokens)
        spans.append(Span(len(ids), end - first, first, num_entries, num_blocks))
        num_entries += num_blocks
        ids += chunk.tokens
        positions += range(first, end)
    sampled, draws = make_draws(plan)
    positions_T = torch.tensor(positions, device=device)
    slot_of_T = torch.tensor([position % block_tokens for position in positions], device=device)
    tables = tuple(
        StepTables(positions_T, *_place_tokens(plan, group, block_tokens, slot_of_T), tuple(spans))
        for group in range(len(layout.layer_groups))
    )
    rows_R = torch.tensor(
        [spans[i].first_row + spans[i].num_tokens - 1 for i in sampled], dtype=torch.int64, device=device
    )
    facts = StepFacts(cache.data, tables, layout.places, on_layer)
    return Batch(torch.tensor(ids, device=device), positions_T, rows_R, sampled, draws, facts)


def make_draws(plan: StepPlan) -> tuple[tuple[int, ...], tuple[Draw, ...]]:
    """(chunks that are sampled, how each of them is)."""
    sampled = tuple(index for index, chunk in enumerate(plan.chunks) if chunk.sampling is not None)
    return sampled, tuple(
        Draw(c.sampling, c.output_position, History(*c.history) if c.history else NO_HISTORY)
        for c in plan.chunks
        if c.sampling is not None
    )


def _place_tokens(plan: StepPlan, group: int, block_tokens: int, slot_of_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(block of each token, its slot, block tables one after the other) of one group."""
    blocks: list[int] = []
    entries: list[int] = []
    for chunk in plan.chunks:
        table, first, end = chunk.tables[group], chunk.first_position, chunk.first_position + len(chunk.tokens)
        entries += table[: -(-end // block_tokens)]
        blocks += [table[position // block_tokens] for position in range(first, end)]
    device = slot_of_T.device
    return torch.tensor(blocks, device=device), slot_of_T, torch.tensor(entries, device=device)
