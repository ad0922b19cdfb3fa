"""A cluster ready to be started: configuration, model folder and decided settings, turned into what workers and ingress
take.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from cluster.config import ClusterConfig, ModelConfig
from cluster.gpus import find_gpus
from cluster.resolve import Machine, Setting, WorkerSettings, given_settings, pool_sizes, resolve_worker
from router.config import RouterConfig
from workers.errors import ModelRefused
from workers.model.arch import read_config, read_spec
from workers.model.families import plan_decoder
from workers.native import build
from workers.pages import Windows
from workers.protocol import Role
from workers.replica.config import ReplicaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    config: ClusterConfig
    model: ModelConfig
    model_path: Path
    worker: WorkerSettings
    settings: tuple[Setting, ...]
    """Every setting and why, for `baton config`."""
    gpus_per_worker: float = 0.0
    """What Ray sets aside for each; below 1 where workers share a GPU."""


def make_plan(config: ClusterConfig, model: ModelConfig, model_path: Path, machine: Machine) -> ClusterPlan:
    """The plan of a cluster whose model is on disk. Raises `ConfigError` or `workers.errors.ModelRefused`."""
    fault, windows = _ask_decoder(model_path)
    worker, decided = resolve_worker(config, read_spec(model_path), machine, fault, windows)
    found = (Setting("model.path", str(model_path), "converted once"),)
    plan = ClusterPlan(
        config=config, model=model, model_path=model_path, worker=worker, settings=(),
        gpus_per_worker=share_gpus(worker, len(machine.gpus.memory_bytes), config),
    )  # fmt: skip
    settings = (
        *given_settings(config, model),
        *_step_budgets(config),
        *found,
        *decided,
        *_front_door(router_config(plan)),
    )
    return replace(plan, settings=settings)


def _step_budgets(config: ClusterConfig) -> Iterator[Setting]:
    for role, _ in pool_sizes(config):
        share = "targets.ttft_ms / 12" if role == "prefill" else "targets.itl_ms / 2"
        is_given = config.worker.step_budget_ms != "auto"
        why = "as configured" if is_given else f"auto: {share}, where prompts join a step"
        yield Setting(f"worker.step_budget_ms ({role})", round(step_budget_ms(config, role), 1), why)


def share_gpus(worker: WorkerSettings, num_gpus: int, config: ClusterConfig) -> float:
    """One each where there are enough, equal parts in hundredths where there are not, 0 on the CPU."""
    num_workers = sum(pool.replicas for _, pool in pool_sizes(config))
    return min(1.0, num_gpus * 100 // num_workers / 100) if worker.device == "cuda" else 0.0


def _ask_decoder(model_path: Path) -> tuple[str, Windows]:
    """Why our own decoder does not serve the model, empty where it does; the windows of its layers."""
    try:
        plan = plan_decoder(read_config(model_path))
    except ModelRefused as error:
        return str(error), ()
    return "", [layer.window for layer in plan.layers]


def find_native_fault() -> str:
    """Why there are no native kernels in this installation; empty where there are."""
    outcome = build.read_outcome()
    if outcome is None:
        return "they were not built; run `make native`"
    if not outcome.is_built:
        return outcome.reason
    return "" if outcome.source_hash == build.hash_sources() else "their sources have changed; run `make native`"


def _front_door(config: RouterConfig) -> Iterator[Setting]:
    """The limits of the ingress, those apart that stand elsewhere."""
    shown = {
        "model_id", "model_path", "max_context_tokens", "disaggregation", "version",
        "default_temperature", "default_top_p", "first_token_s", "progress_s",
    }  # fmt: skip
    for limit in fields(config):
        if limit.name not in shown:
            yield Setting(f"router.{limit.name}", getattr(config, limit.name), "built in")


def replica_config(plan: ClusterPlan, role: Role, secret_path: Path) -> ReplicaConfig:
    """What one replica of the pool `role` is constructed with."""
    worker, transfer = plan.worker, plan.config.transfer
    return ReplicaConfig(
        role=role,
        backend=worker.backend,
        model_path=str(plan.model_path),
        model_id=plan.model.id,
        dtype=worker.dtype,
        kv_dtype=worker.kv_dtype,
        block_tokens=worker.block_tokens,
        num_blocks=worker.num_blocks,
        max_context_tokens=worker.max_context_tokens,
        chunk_tokens=worker.chunk_tokens,
        step_budget_ms=step_budget_ms(plan.config, role),
        prefix_cache=worker.prefix_cache,
        max_running=worker.max_running,
        ttft_target_ms=plan.config.targets.ttft_ms,
        host=plan.config.host,
        secret_path=str(secret_path),
        transport=transfer.transport,
        verify=transfer.verify,
        min_unit_bytes=transfer.min_unit_bytes,
        drain_timeout_s=plan.config.drain_timeout_s,
        num_threads=worker.threads,
    )


def step_budget_ms(config: ClusterConfig, role: Role) -> float:
    """Milliseconds of a step that computes prompts: where tokens are generated half of their target, so that a stream
    beside a prompt keeps it; on prefill a twelfth of its target, so that a short prompt waits little for a long one's
    chunk."""
    given = config.worker.step_budget_ms
    if given != "auto":
        return given
    return config.targets.ttft_ms / 12 if role == "prefill" else config.targets.itl_ms / 2


def router_config(plan: ClusterPlan) -> RouterConfig:
    """What an ingress is constructed with."""
    return RouterConfig(
        model_id=plan.model.id,
        model_path=str(plan.model_path),
        max_context_tokens=plan.worker.max_context_tokens,
        disaggregation=plan.config.disaggregation,
        allowed_hosts=("localhost", "127.0.0.1", "::1"),
        default_temperature=plan.model.sampling.temperature,
        default_top_p=plan.model.sampling.top_p,
        first_token_s=plan.config.deadlines.first_token_s,
        progress_s=plan.config.deadlines.progress_s,
    )


def this_machine() -> Machine:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(pages * page_bytes, os.cpu_count() or 1, find_native_fault(), find_gpus())
