"""What one ingress needs to know, resolved before it starts."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Every field is resolved: no "auto" reaches an ingress."""

    model_id: str
    """The name that requests carry in `model`."""
    model_path: str
    """Folder with tokenizer.json, tokenizer_config.json and config.json."""
    max_context_tokens: int = 8192
    """Prompt and output tokens of one request together, 2 to 131072."""
    default_temperature: float = 1.0
    """Where a request names none, 0 to 2; the model's configuration sets it."""
    default_top_p: float = 1.0
    """Where a request names none, 0 to 1."""
    disaggregation: Literal["always", "never"] = "always"
    """always: a prefill and a decode worker serve each request; never: one colocated worker does."""
    local_fallback: bool = True
    """A decode worker may compute the prompt itself after a failed transfer when no other prefill worker is ready."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that requests may name, without ports; empty: any. On loopback it keeps rebound names of pages out."""
    max_body_bytes: int = 1 << 20
    """Larger request bodies are answered by 413."""
    max_messages: int = 2048
    max_stop_strings: int = 4
    max_stop_chars: int = 1024
    """Characters of one stop string."""
    max_queued: int = 256
    """Requests that wait for a worker; the next one is answered by 429."""
    first_token_s: float = 60.0
    """Arrival to the first token."""
    progress_s: float = 30.0
    """Between two tokens of a stream."""
    max_total_s: float = 3600.0
    """Upper bound of the header x-baton-timeout-s."""
    slow_client_s: float = 60.0
    """A client whose socket takes no byte for this long is cut."""
    body_s: float = 30.0
    """A client gets this long to send its body."""
    resume_grace_s: float = 2.0
    """A worker whose link was lost is lost itself when it cannot be dialled again within this time."""
    verdict_s: float = 3.0
    """Decode's verdict on an attempt is awaited this long after prefill's link was lost."""
    max_failed_transfers: int = 2
    max_crash_charges: int = 2
    tokenizer_threads: int = 1
    version: str = "0.1.0"
    """What /version answers."""
