"""Our decoder under the engine and by itself: greedy tokens of prompts, logits of a text."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kv_transfer.layout import KVLayout
from tests.support.replay import Replayed, replay
from workers.engine.config import EngineConfig
from workers.engine.plan import Chunk, StepPlan
from workers.model.build import WeightMode, load_decoder
from workers.model.decoder import Decoder
from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache
from workers.runner.model_runner import ModelRunner
from workers.runner.probe import Model


def load(folder: Path, mode: WeightMode = "fp32", ops: Ops | None = None) -> Decoder:
    return load_decoder(folder, mode, ops or ReferenceOps())


def make_cache(model: Model, block_tokens: int, num_blocks: int, device: torch.device | str = "cpu") -> PagedKVCache:
    spec = model.spec
    return PagedKVCache(
        KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, block_tokens, "fp32"), num_blocks, device
    )


def generate(
    model: Model, prompts: Sequence[Sequence[int]], num_tokens: int, chunk: int, stagger: int = 0,
    block_tokens: int = 16, num_blocks: int = 200,
) -> Replayed:  # fmt: skip
    """Greedy tokens through the engine."""
    config = EngineConfig(
        block_tokens=block_tokens, num_blocks=num_blocks, chunk_tokens=chunk, max_running=16,
        max_context_tokens=block_tokens * num_blocks,
    )  # fmt: skip
    runner = ModelRunner(model, make_cache(model, block_tokens, num_blocks))
    return replay(runner, config, prompts, num_tokens, stagger)


def compute_logits(
    model: Model, tokens: Sequence[int], chunk: int = 1 << 30, device: torch.device | str = "cpu"
) -> Tensor:
    """`[len(tokens), vocab]`: the logits after each token of one text, computed in chunks."""
    block_tokens = 16
    num_blocks = -(-len(tokens) // block_tokens)
    cache = make_cache(model, block_tokens, num_blocks, device)
    parts = []
    for first in range(0, len(tokens), chunk):
        part = tuple(tokens[first : first + chunk])
        key = StreamKey(bytes(16), 0)
        table = tuple(reversed(range(num_blocks)))
        plan = StepPlan((Chunk(key, part, first, table, SamplingParams(), 0, False, True),))
        batch = make_batch(plan, cache, lambda layer: None)
        parts.append(model.forward(batch.ids_T, batch.positions_T, torch.arange(len(part), device=device), batch.facts))
    return torch.cat(parts)
