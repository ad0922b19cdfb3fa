"""What prefill tells decode beside the KV cache: the meta of FIN. Pure data; opaque to kv_transfer."""

from dataclasses import dataclass
from typing import Annotated

from kv_transfer.codec import Between, Codec
from workers.protocol import Count, Logprobs, TokenId


@dataclass(frozen=True, slots=True)
class HandOff:
    """The first token, sampled by prefill, and what it was computed from."""

    token: TokenId
    position: Count
    """Its index among the stream's output tokens: len(emitted)."""
    num_tokens: Annotated[int, Between(1, 1 << 20)]
    """Prompt and emitted tokens whose KV was shipped or skipped."""
    logprobs: Logprobs | None = None


HANDOFF_CODEC = Codec(HandOff, max_frame_bytes=64 << 10, max_array=1 << 14)
