"""Our decoder under the engine and by itself: greedy tokens of prompts, logits of a text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.replay import Replayed, replay
from workers.engine.config import EngineConfig
from workers.engine.plan import Chunk, StepPlan
from workers.model.build import WeightMode, load_decoder
from workers.model.decoder import Decoder
from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.runner.model_runner import ModelRunner
from workers.runner.probe import Model


def load(folder: Path, mode: WeightMode = "fp32", ops: Ops | None = None) -> Decoder:
    return load_decoder(folder, mode, ops or ReferenceOps())


def make_cache(model: Model, block_tokens: int, num_pages: int, device: torch.device | str = "cpu") -> PagedKVCache:
    """One with `num_pages` blocks for each state group."""
    layout = plan_layout(model.spec, model.state("fp32"), block_tokens, "fp32")
    return PagedKVCache(layout, num_pages * len(layout.layer_groups), device)


def generate(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int, stagger: int = 0,
    block_tokens: int = 16, num_blocks: int = 200, **limits: Any,
) -> Replayed:  # fmt: skip
    """Greedy tokens through the engine, over `num_blocks` blocks for each state group; `limits` are further fields of
    its configuration.
    """
    cache = make_cache(model, block_tokens, num_blocks)
    sizes = {"block_tokens": block_tokens, "num_blocks": cache.num_blocks}
    rest = {"chunk_tokens": chunk, "max_running": 16, "max_context_tokens": block_tokens * num_blocks}
    config = EngineConfig(windows=tuple(group.window for group in cache.layout.layer_groups), **(sizes | rest | limits))
    runner = ModelRunner(model, cache)
    return replay(runner, config, prompts, num_tokens, stagger)


def compute_logits(
    model: Model, tokens: Sequence[int], chunk: int = 1 << 30, device: torch.device | str = "cpu"
) -> Tensor:
    """`[len(tokens), vocab]`: the logits after each token of one text, computed in chunks."""
    block_tokens = 16
    num_blocks = -(-len(tokens) // block_tokens)
    cache = make_cache(model, block_tokens, num_blocks, device)
    edges = range(0, cache.num_blocks, num_blocks)
    tables = tuple(tuple(reversed(range(edge, edge + num_blocks))) for edge in edges)
    parts = []
    for first in range(0, len(tokens), chunk):
        part = tuple(tokens[first : first + chunk])
        key = StreamKey(bytes(16), 0)
        plan = StepPlan((Chunk(key, part, first, tables, SamplingParams(), 0, False, True),))
        batch = make_batch(plan, cache, lambda layer: None)
        parts.append(model.forward(batch.ids_T, batch.positions_T, torch.arange(len(part), device=device), batch.facts))
    return torch.cat(parts)
