"""A step plan to the tensors of one flat batch: every token of every chunk once, no padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kv_transfer.layout import KVLayout
from workers.engine.plan import StepPlan
from workers.model.paged_attention import StepFacts
from workers.ops.base import PlainTables, Span, StepTables
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


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """The same in plain numbers."""

    ids: list[int]
    rows: list[int]
    tables: tuple[PlainTables, ...]
    """One per state group."""


def make_batch(plan: StepPlan, cache: PagedKVCache, on_layer: Callable[[int], None]) -> Batch:
    """The tensors of `plan` on the cache's device: parts of one, because each costs as much as it does alone."""
    sampled, draws = make_draws(plan)
    plain = make_plain_batch(plan, sampled, cache.layout)
    first = plain.tables[0]
    parts = [plain.ids, first.positions, first.slot_of, plain.rows]
    parts += chain.from_iterable((tables.block_of, tables.table) for tables in plain.tables)
    whole = torch.tensor(list(chain.from_iterable(parts)), device=cache.data.device)
    ids_T, positions_T, slot_of_T, rows_R, *placed = whole.split_with_sizes([len(part) for part in parts])
    tables = tuple(
        StepTables(positions_T, block_of_T, slot_of_T, table_X, tuple(first.spans))
        for block_of_T, table_X in zip(placed[::2], placed[1::2], strict=True)
    )
    facts = StepFacts(cache.data, tables, cache.layout.places, on_layer)
    return Batch(ids_T, positions_T, rows_R, sampled, draws, facts)


def make_plain_batch(plan: StepPlan, sampled: Sequence[int], layout: KVLayout) -> PlainBatch:
    """`sampled`: the chunks that are."""
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
    slots = [position % block_tokens for position in positions]
    tables = tuple(
        PlainTables(positions, block_of, slots, table, spans)
        for block_of, table in (_place_tokens(plan, group, block_tokens) for group in range(len(layout.layer_groups)))
    )
    return PlainBatch(ids, [spans[i].first_row + spans[i].num_tokens - 1 for i in sampled], tables)


def make_draws(plan: StepPlan) -> tuple[tuple[int, ...], tuple[Draw, ...]]:
    """(chunks that are sampled, how each of them is)."""
    sampled = tuple(index for index, chunk in enumerate(plan.chunks) if chunk.sampling is not None)
    return sampled, tuple(
        Draw(c.sampling, c.output_position, History(*c.history) if c.history else NO_HISTORY)
        for c in plan.chunks
        if c.sampling is not None
    )


def _place_tokens(plan: StepPlan, group: int, block_tokens: int) -> tuple[list[int], list[int]]:
    """(block of each token, block tables one after the other) of one group."""
    blocks: list[int] = []
    entries: list[int] = []
    for chunk in plan.chunks:
        table, first, end = chunk.tables[group], chunk.first_position, chunk.first_position + len(chunk.tokens)
        entries += table[: -(-end // block_tokens)]
        blocks += [table[position // block_tokens] for position in range(first, end)]
    return blocks, entries
