"""From a replica's configuration to a model in memory with its cache, its digest and its engine's limits. Imports
torch.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from kv_transfer.layout import KVLayout, make_model_digest
from workers.engine.config import EngineConfig
from workers.model.arch import DecoderSpec
from workers.model.progress import Progress, ignore_progress
from workers.replica.config import ReplicaConfig
from workers.runner.model_runner import ModelRunner, digest_facts, load_runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: ModelRunner
    spec: DecoderSpec
    engine_config: EngineConfig
    digest: str
    """Equal for two workers exactly when they may share KV caches."""

    @property
    def layout(self) -> KVLayout:
        return self.runner.cache.layout

    @property
    def data(self) -> torch.Tensor:
        """The cache: `[num_layers, num_blocks, 2, num_kv_heads, block_tokens, head_dim]`."""
        return self.runner.cache.data


def load_model(config: ReplicaConfig, progress: Progress = ignore_progress) -> LoadedModel:
    """Takes seconds. Sets the process's torch threads. Raises `ModelRefused`, `ModelDamaged`, or ValueError for limits
    that contradict each other."""
    torch.set_num_threads(config.num_threads)
    engine_config = EngineConfig(
        block_tokens=config.block_tokens,
        num_blocks=config.num_blocks,
        chunk_tokens=config.chunk_tokens,
        max_running=config.max_running,
        max_context_tokens=config.max_context_tokens,
    )
    folder = Path(config.model_path)
    runner = load_runner(folder, config.dtype, config.kv_dtype, config.block_tokens, config.num_blocks, progress)
    digest = make_model_digest(digest_facts(folder, runner.model.spec, config.dtype))
    return LoadedModel(runner, runner.model.spec, engine_config, digest)
