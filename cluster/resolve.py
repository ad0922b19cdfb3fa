"""Decides every "auto" once, with the reason that `baton config` prints. Pure: a configuration, a model and a machine
go in.

Settings that need the model's config.json stay open until the model is on disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cluster.config import ClusterConfig, ModelConfig, PoolConfig, WorkerConfig
from cluster.gpus import NO_GPUS, Gpus
from cluster.yaml_source import ConfigError
from kv_transfer.layout import Dtype
from workers.engine.state import StateSpec
from workers.model.arch import DecoderSpec
from workers.model.footprint import Paging, plan_paging
from workers.model.state import kv_state
from workers.pages import Windows

KV_MEMORY_SHARE = 8
"""A worker's KV pool takes at most one part in this many of the machine's memory."""
MAX_POOL_CONTEXTS = 4
"""A pool larger than this many full contexts serves nobody on one machine."""
GPU_KV_MEMORY_SHARE = 4
"""The same of a GPU's memory: a prefill and a decode worker and their weights share one."""
CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 128, 2048
DTYPE_REASON = "CPU: 4-bit weights and 8-bit activations, both in groups of 32; fp32 is exact and slower"


@dataclass(frozen=True, slots=True)
class Machine:
    memory_bytes: int
    num_cpus: int
    native_fault: str = ""
    """Why the C++ kernels do not run here; empty where they do."""
    gpus: Gpus = NO_GPUS


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: object
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """A worker's settings with no "auto" left."""

    device: Literal["cpu", "cuda"]
    backend: Literal["native", "reference", "cuda", "transformers"]
    dtype: Literal["fp32", "bf16", "int8", "q4"]
    kv_dtype: Literal["fp32", "bf16"]
    block_tokens: int
    num_blocks: int
    max_context_tokens: int
    chunk_tokens: int
    prefix_cache: bool
    max_running: int
    threads: int


def resolve_worker(
    config: ClusterConfig,
    spec: DecoderSpec,
    machine: Machine,
    decoder_fault: str = "",
    windows: Windows = (),
) -> tuple[WorkerSettings, tuple[Setting, ...]]:
    """The settings of every worker, and why. `decoder_fault`: why our own decoder does not know the model, if so;
    otherwise `windows` are those of its layers (default: none has one).

    Raises `ConfigError` where an explicit value does not fit the model, and `ModelRefused` as `plan_groups`.
    """
    settings = {setting.key: setting for setting in _decide(config, spec, machine, decoder_fault, windows)}
    values = {key.removeprefix("worker."): setting.value for key, setting in settings.items()}
    worker = WorkerSettings(**values)  # type: ignore[arg-type]  # keys and types agree, see the tests
    if worker.max_context_tokens > spec.max_positions:
        raise ConfigError(
            f"worker.max_context_tokens: {worker.max_context_tokens} is over the model's {spec.max_positions}"
            " positions; lower it or write auto"
        )
    shape = (worker.block_tokens, worker.max_context_tokens, worker.chunk_tokens)
    needed = plan_paging(_state(spec, windows, worker.backend, worker.kv_dtype), *shape).blocks_per_context
    if worker.num_blocks < needed:
        raise ConfigError(
            f"worker.num_blocks: {worker.num_blocks} blocks of {worker.block_tokens} tokens hold no full context of"
            f" {worker.max_context_tokens} tokens, which takes {needed}; raise it, lower worker.max_context_tokens, or"
            " write auto"
        )
    return worker, tuple(settings.values())


def _decide(
    config: ClusterConfig, spec: DecoderSpec, machine: Machine, decoder_fault: str, windows: Windows
) -> Iterator[Setting]:
    given = config.worker
    device, why = _choose_device(given, machine.gpus, decoder_fault)
    yield _pick("device", given.device, device, why)
    backend, why = _choose_backend(device, machine, decoder_fault)
    yield _pick("backend", given.backend, backend, why)
    backend = backend if given.backend == "auto" else given.backend
    dtype, why = {"native": ("q4", DTYPE_REASON), "cuda": ("bf16", "GPU: tensor cores; fp32 is exact and slower")}.get(
        backend, ("fp32", "without native kernels fewer bits are slower")
    )
    yield _pick("dtype", given.dtype, dtype, why)
    dtype = dtype if given.dtype == "auto" else given.dtype
    kv_dtype = given.kv_dtype if given.kv_dtype != "auto" else "fp32" if dtype == "fp32" else "bf16"
    yield _pick("kv_dtype", given.kv_dtype, kv_dtype, f"beside {dtype} weights")
    block_tokens = given.block_tokens if given.block_tokens != "auto" else 32 if backend == "native" else 16
    yield _pick("block_tokens", given.block_tokens, block_tokens, "tokens per KV block, as the kernels like it")
    context = given.max_context_tokens if given.max_context_tokens != "auto" else spec.max_positions
    yield _pick("max_context_tokens", given.max_context_tokens, context, "the model's max_position_embeddings")
    chunk, chunk_why = CPU_CHUNK_TOKENS, "CPU: KV leaves early and short prompts wait little"
    if device == "cuda":
        chunk, chunk_why = GPU_CHUNK_TOKENS, "GPU: fewer tokens leave it idle"
    chunk = given.chunk_tokens if given.chunk_tokens != "auto" else chunk
    paging = plan_paging(_state(spec, windows, backend, kv_dtype), block_tokens, context, chunk)
    blocks, why = _plan_blocks(paging, _memory_for_kv(device, machine, given.max_running))
    yield _pick("num_blocks", given.num_blocks, blocks, why)
    yield _pick("chunk_tokens", given.chunk_tokens, chunk, chunk_why)
    why = "equal beginnings are computed once; an answer is the same either way"
    yield Setting("worker.prefix_cache", given.prefix_cache, why if given.prefix_cache else "as configured")
    yield Setting("worker.max_running", given.max_running, "streams that one worker decodes together")
    yield _pick(
        "threads", given.threads, 1, "one torch thread per worker: prefill and decode share the machine's cores"
    )


def _choose_device(given: WorkerConfig, gpus: Gpus, decoder_fault: str) -> tuple[Literal["cpu", "cuda"], str]:
    """A GPU wherever one can be used; raises `ConfigError` where one is asked for and cannot."""
    lack = gpus.fault
    if given.backend not in ("auto", "cuda"):
        lack = f"the backend {given.backend} runs on the CPU"
    elif decoder_fault:
        lack = f"only our own decoder runs on a GPU: {decoder_fault}"
    if given.device == "cpu" and given.backend == "cuda":
        raise ConfigError("worker.device: cpu and worker.backend: cuda contradict each other; write auto for one")
    if given.device == "cpu":
        return "cpu", "as configured"
    if not lack:
        return "cuda", f"{len(gpus.memory_bytes)} NVIDIA GPU(s)"
    if given.device == "cuda" or given.backend == "cuda":
        raise ConfigError(f"worker.{'device' if given.device == 'cuda' else 'backend'}: cuda, but {lack}; write auto")
    return "cpu", lack


def _choose_backend(device: str, machine: Machine, decoder_fault: str) -> tuple[str, str]:
    if decoder_fault:
        return "transformers", f"our decoder does not know this model: {decoder_fault}"
    if device == "cuda":
        return "cuda", f"our decoder over cuBLAS, decode steps as CUDA graphs; attention: {machine.gpus.attention}"
    if machine.native_fault:
        return "reference", f"our decoder in plain torch; no native kernels: {machine.native_fault}"
    return "native", "our decoder over C++ kernels, one call a step"


def _pick(name: str, given: object, decided: object, reason: str) -> Setting:
    if given == "auto":
        return Setting(f"worker.{name}", decided, f"auto: {reason}")
    return Setting(f"worker.{name}", given, "as configured")


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a pool of KV blocks may take."""

    total_bytes: int
    share: int
    """One part in so many."""
    max_contexts: int


def _memory_for_kv(device: str, machine: Machine, max_running: int) -> _Memory:
    if device == "cuda":
        return _Memory(min(machine.gpus.memory_bytes), GPU_KV_MEMORY_SHARE, max_running)
    return _Memory(machine.memory_bytes, KV_MEMORY_SHARE, MAX_POOL_CONTEXTS)


def _state(spec: DecoderSpec, windows: Windows, backend: str, kv_dtype: Dtype) -> tuple[StateSpec, ...]:
    """What each layer keeps; the transformers classes keep all."""
    known = windows if windows and backend != "transformers" else [None] * spec.num_layers
    return kv_state(spec.num_kv_heads, spec.head_dim, known, kv_dtype)


def _plan_blocks(paging: Paging, memory: _Memory) -> tuple[int, str]:
    """As many blocks as the memory share holds, at least one and at most `max_contexts` full contexts."""
    block_bytes, blocks_per_context = paging
    affordable = memory.total_bytes // memory.share // block_bytes
    blocks = min(max(affordable, blocks_per_context), memory.max_contexts * blocks_per_context)
    contexts = blocks / blocks_per_context
    return blocks, (
        f"{contexts:.1f} full contexts, {blocks * block_bytes / (1 << 20):,.0f} MiB touched as used"
        f" (at most 1/{memory.share} of {memory.total_bytes / (1 << 30):.0f} GiB,"
        f" 1 to {memory.max_contexts} contexts)"
    )


def given_settings(config: ClusterConfig, model: ModelConfig) -> tuple[Setting, ...]:
    """The settings that need no decision."""
    pools = {name: pool.replicas for name, pool in pool_sizes(config)}
    why = {
        "always": "prefill computes each prompt and ships its KV; decode computes one only after a failed transfer",
        "never": "colocated workers compute prompts and tokens",
    }
    return (
        Setting("model", model.id, model.description or "as configured"),
        Setting("model.sampling.temperature", model.sampling.temperature, "where a request names none"),
        Setting("model.sampling.top_p", model.sampling.top_p, "where a request names none"),
        Setting("disaggregation", config.disaggregation, why[config.disaggregation]),
        *(Setting(f"pools.{name}.replicas", count, "fixed") for name, count in pools.items()),
        Setting("ingress.replicas", 1, "one judge holds the queue"),
        Setting("host", config.host, "every listener is on loopback"),
        Setting("port", config.port, "HTTP"),
        Setting(
            "transfer.transport",
            config.transfer.transport,
            "auto: shared memory within a host, gloo between hosts; `baton status` shows the choice",
        ),
        Setting("transfer.verify", config.transfer.verify, "checksums of KV units; auto: not for shared memory"),
        Setting(
            "transfer.min_unit_bytes",
            config.transfer.min_unit_bytes,
            "a unit of KV is at least this large where the prompt allows",
        ),
        Setting("targets.ttft_ms", config.targets.ttft_ms, "the diagnosis and prefill's admission compare with it"),
        Setting("targets.itl_ms", config.targets.itl_ms, "the diagnosis compares with it"),
        Setting(
            "deadlines.first_token_s", config.deadlines.first_token_s, "arrival to the first token, queue included"
        ),
        Setting("deadlines.progress_s", config.deadlines.progress_s, "between two tokens of a stream"),
        Setting(
            "drain_timeout_s", config.drain_timeout_s, "how long a worker that is asked to end lets its streams run"
        ),
    )


def pool_sizes(config: ClusterConfig) -> Iterator[tuple[Literal["prefill", "decode", "colocated"], PoolConfig]]:
    """The pools that exist, in the order requests pass them."""
    if config.pools.prefill:
        yield "prefill", config.pools.prefill
    if config.pools.decode:
        yield "decode", config.pools.decode
    if config.pools.colocated:
        yield "colocated", config.pools.colocated
