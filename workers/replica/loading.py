"""From a replica's configuration to a model in memory with its cache, its digest and its engine's limits. Imports
torch.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kv_transfer.layout import KVLayout, make_model_digest
from kv_transfer.pool import SharedPool
from kv_transfer.transports.select import find_shm_fault
from workers.engine.config import EngineConfig
from workers.engine.cost import CostTable
from workers.model.arch import DecoderSpec
from workers.model.progress import Progress, ignore_progress
from workers.replica.config import ReplicaConfig
from workers.runner.calibrate import measure_costs
from workers.runner.choose import RunnerSettings, choose_runner
from workers.runner.model_runner import ModelRunner, digest_facts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    runner: ModelRunner
    spec: DecoderSpec
    engine_config: EngineConfig
    costs: CostTable
    """What its steps take on this machine, measured just now."""
    digest: str
    """Equal for two workers exactly when they may share KV caches."""
    pool: SharedPool | None = None
    """The memory of the cache, where writers of this host may be let in."""
    shm_fault: str = ""
    """Why KV cannot move through shared memory here; empty where it can."""

    @property
    def layout(self) -> KVLayout:
        return self.runner.cache.layout

    @property
    def data(self) -> torch.Tensor:
        """The cache: `layout.cache_shape(num_blocks)`."""
        return self.runner.cache.data


def load_model(config: ReplicaConfig, progress: Progress = ignore_progress) -> LoadedModel:
    """Takes seconds. Sets the process's torch threads. Raises `ModelRefused`, `ModelDamaged`, or ValueError for limits
    that contradict each other."""
    torch.set_num_threads(config.num_threads)
    shm_fault = find_shm_fault()
    pool = SharedPool() if config.role == "decode" and config.transport in ("auto", "shm") and not shm_fault else None
    settings = RunnerSettings(
        folder=Path(config.model_path),
        mode=config.dtype,
        kv_dtype=config.kv_dtype,
        block_tokens=config.block_tokens,
        num_blocks=config.num_blocks,
        max_context_tokens=config.max_context_tokens,
        max_running=config.max_running,
        backend=config.backend,
        num_threads=config.num_threads,
        allocate=pool.allocate if pool is not None else None,
    )
    chosen = choose_runner(settings, progress)
    logger.info("model %s in %s computed by %s", config.model_id, config.dtype, chosen.how)
    engine_config = EngineConfig(
        block_tokens=config.block_tokens,
        num_blocks=config.num_blocks,
        chunk_tokens=config.chunk_tokens,
        max_running=config.max_running,
        max_context_tokens=config.max_context_tokens,
        step_budget_ms=config.step_budget_ms,
        prefix_cache=config.prefix_cache,
        windows=tuple(group.window for group in chosen.runner.cache.layout.layer_groups),
    )
    spec = chosen.runner.model.spec
    digest = make_model_digest(digest_facts(settings.folder, spec, config.dtype))
    progress("measuring steps", 0.0)
    costs = measure_costs(chosen.runner, engine_config)
    logger.info("steps: %s", costs)
    if chosen.runner.cache.data.device.type != "cpu":
        pool, shm_fault = None, "the cache is in the memory of a GPU"
    return LoadedModel(chosen.runner, spec, engine_config, costs, digest, pool, shm_fault)
