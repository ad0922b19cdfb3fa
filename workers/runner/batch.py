"""A step plan to the tensors of one flat batch: every token of every chunk once, no padding."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.plan import StepPlan
from workers.model.paged_attention import Span, StepFacts
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
    block_tokens, kv_heads = cache.layout.block_tokens, cache.layout.num_kv_heads
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    gathered: list[int] = []
    spans: list[Span] = []
    for chunk in plan.chunks:
        first, count = chunk.first_position, len(chunk.tokens)
        num_blocks = -(-(first + count) // block_tokens)
        spans.append(Span(len(ids), count, first, 2 * kv_heads * len(gathered), num_blocks))
        ids += chunk.tokens
        positions += range(first, first + count)
        blocks += [chunk.blocks[position // block_tokens] for position in range(first, first + count)]
        gathered += chunk.blocks[:num_blocks]
    sampled, draws = make_draws(plan)
    device = cache.data.device
    positions_T = torch.tensor(positions, device=device)
    facts = StepFacts(
        data=cache.data,
        block_of_T=torch.tensor(blocks, device=device),
        slot_of_T=positions_T % block_tokens,
        gathered_rows=_gather_rows(torch.tensor(gathered, device=device), spans, kv_heads),
        spans=tuple(spans),
        on_layer=on_layer,
    )
    rows_R = torch.tensor(
        [spans[i].first_row + spans[i].num_tokens - 1 for i in sampled], dtype=torch.int64, device=device
    )
    return Batch(torch.tensor(ids, device=device), positions_T, rows_R, sampled, draws, facts)


def make_draws(plan: StepPlan) -> tuple[tuple[int, ...], tuple[Draw, ...]]:
    """(chunks that are sampled, how each of them is)."""
    sampled = tuple(index for index, chunk in enumerate(plan.chunks) if chunk.sampling is not None)
    return sampled, tuple(
        Draw(c.sampling, c.output_position, History(*c.history) if c.history else NO_HISTORY)
        for c in plan.chunks
        if c.sampling is not None
    )


def _gather_rows(blocks_N: Tensor, spans: list[Span], kv_heads: int) -> Tensor:
    """For each span `[2, kv_heads, num_blocks]` row numbers, flattened and laid one after the other."""
    heads_X1 = torch.arange(2 * kv_heads, device=blocks_N.device)[:, None]
    parts = torch.split(blocks_N, [span.num_blocks for span in spans])
    return torch.cat([(heads_X1 + part[None] * (2 * kv_heads)).view(-1) for part in parts])
