"""What one replica needs to know, resolved before it starts."""

from dataclasses import dataclass
from typing import Literal

from workers.protocol import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Every field is resolved but what two replicas settle between them."""

    role: Role
    model_path: str
    """Folder with config.json and safetensors."""
    model_id: str
    """The name that requests carry in `model`."""
    dtype: Literal["fp32", "bf16", "int8", "q4"] = "fp32"
    """Of the weights; int8 and q4 also round activations to 8 bits, see docs/models.md."""
    backend: Literal["auto", "native", "reference", "cuda", "transformers"] = "auto"
    """What computes: our decoder over C++, plain torch or CUDA, or the transformers classes."""
    kv_dtype: Literal["fp32", "bf16"] = "fp32"
    block_tokens: int = 16
    """Tokens per KV block, 1 to 4096."""
    num_blocks: int = 1024
    """KV blocks in the pool."""
    max_context_tokens: int = 8192
    chunk_tokens: int = 256
    """Prompt tokens computed per step, all requests together."""
    step_budget_ms: float | None = None
    """Milliseconds that a step may take once prompts join it; None: only chunk_tokens bounds it."""
    prefix_cache: bool = True
    """Requests of one tenant share the KV blocks of equal beginnings."""
    max_running: int = 64
    """Requests that decode together."""
    headroom_blocks: int = 4
    """Blocks reserved on decode beyond the prompt's, where the stream may still need them."""
    ttft_target_ms: int = 2000
    """A prefill worker accepts 0.3 of this in uncached work, and at least one prompt."""
    host: str = "127.0.0.1"
    """Address of every listener."""
    secret_path: str
    """File with the cluster's key ring."""
    transport: Literal["auto", "shm", "gloo", "loopback"] = "auto"
    """How KV moves; "auto" is settled with each peer in the handshake: shm within a host, gloo between hosts."""
    verify: Literal["auto", "off", "full"] = "auto"
    """Checksums of KV units; "auto": where they leave the memory of the two processes."""
    min_unit_bytes: int = 2 << 20
    """A unit of KV is at least this large where the prompt allows."""
    drain_timeout_s: float = 5.0
    num_threads: int = 1
    """Torch threads of this process."""
