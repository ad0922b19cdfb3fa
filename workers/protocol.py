"""What crosses between an ingress and a worker: the messages of the front link, exactly as docs/protocol.md lists them.

Pure data with limits; no torch, no asyncio. A stream is the 128-bit random id of one choice of one request. An attempt
counts the GENERATEs of a stream: it is a fence and nothing else. An incarnation is the 64-bit random id of a process.
All times are remaining or elapsed milliseconds, never clock readings.
"""

import secrets
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from kv_transfer.codec import Between, Codec, Size
from kv_transfer.errors import FrameInvalid

FRONT_PLANE = "front"
MAX_TOKENS = 1 << 17
HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
LOST_S = 10.0

StreamId = Annotated[bytes, Size(16, 16)]
Attempt = Annotated[int, Between(0, 1 << 30)]
Incarnation = Annotated[int, Between(0, (1 << 64) - 1)]
Count = Annotated[int, Between(0, 1 << 40)]
Milliseconds = Annotated[int, Between(0, 86_400_000)]
TokenId = Annotated[int, Between(0, (1 << 31) - 1)]
PackedTokens = Annotated[bytes, Size(0, 4 * MAX_TOKENS)]
"""Token ids as little-endian u32, see `pack_tokens`."""
Tenant = Annotated[bytes, Size(0, 32)]
"""Whose cached prefixes a request may use and add to; b"" is everybody's."""
MAX_PRIORITY = 100
Priority = Annotated[int, Between(-MAX_PRIORITY, MAX_PRIORITY)]
"""Higher goes first; 0 is ordinary."""
PRIORITY_S = 8.0
"""Each level of priority counts as this many seconds of waiting, so that nothing waits for ever."""
NAME_BYTES = 16
MAX_NAMES = 1024
PackedNames = Annotated[bytes, Size(0, NAME_BYTES * MAX_NAMES)]
"""Names of cached blocks, see `prefix_hash.py`, one after the other."""

Role = Literal["prefill", "decode", "colocated"]
WorkerState = Literal["starting", "ready", "draining", "stopped"]
LocalReason = Literal["none", "local", "resume", "fallback"]
FinishReason = Literal["stop", "length"]
BusyReason = Literal["blocks", "slots", "prefill_time", "draining", "behind_older", "no_lane"]
FailReason = Literal["invalid", "deadline", "transfer", "peer_lost", "draining", "unknown", "internal"]
Stage = Literal["prefill", "transfer", "decode"]
AbortReason = Literal["disconnect", "deadline", "stop", "retry", "shutdown", "slow_client", "superseded"]


class StreamKey(NamedTuple):
    """One attempt of one stream."""

    stream: bytes
    attempt: int

    def __repr__(self) -> str:
        return f"{self.stream.hex()[:8]}#{self.attempt}"


def mint_incarnation() -> int:
    """A random non-zero process id that no restart repeats."""
    return secrets.randbits(63) + 1


def pack_tokens(tokens: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as little-endian u32 bytes."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`; raises ValueError when the length is no multiple of four."""
    if len(packed) % 4:
        raise ValueError(f"packed token ids need a multiple of 4 bytes, got {len(packed)}")
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def unpack_names(packed: bytes) -> list[bytes]:
    """Names of blocks from one frame; raises FrameInvalid when the length is no multiple of NAME_BYTES."""
    if len(packed) % NAME_BYTES:
        raise FrameInvalid(f"packed names need a multiple of {NAME_BYTES} bytes, got {len(packed)}")
    return [packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES)]


Logprob = Annotated[float, Between(-9999.0, 0.0)]
"""Natural logarithm of a probability, -9999 where that is smaller still, as OpenAI writes it."""


@dataclass(frozen=True, slots=True)
class TopToken:
    token: TokenId
    logprob: Logprob


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one output token: softmax of the model's own logits, before penalties, biases, masks and settings."""

    chosen: Logprob
    """Of the token that was sampled."""
    top: Annotated[tuple[TopToken, ...], Size(0, 20)]
    """The likeliest tokens, falling; among equals the lower id comes first."""


@dataclass(frozen=True, slots=True)
class TokenBias:
    token: TokenId
    bias: Annotated[float, Between(-100.0, 100.0)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one stream draws its tokens and when it ends.

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 are off. `stop_token_ids` holds the end-of-sequence ids
    too.
    """

    temperature: Annotated[float, Between(0.0, 100.0)] = 0.0
    top_k: Annotated[int, Between(0, 1 << 20)] = 0
    top_p: Annotated[float, Between(0.0, 1.0)] = 1.0
    min_p: Annotated[float, Between(0.0, 1.0)] = 0.0
    seed: Annotated[int, Between(0, (1 << 63) - 1)] = 0
    max_tokens: Annotated[int, Between(1, MAX_TOKENS)] = 16
    stop_token_ids: Annotated[tuple[TokenId, ...], Size(0, 64)] = ()
    repetition_penalty: Annotated[float, Between(0.01, 100.0)] = 1.0
    presence_penalty: Annotated[float, Between(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Between(-2.0, 2.0)] = 0.0
    logit_bias: Annotated[tuple[TokenBias, ...], Size(0, 1024)] = ()
    min_tokens: Annotated[int, Between(0, MAX_TOKENS)] = 0
    """No stop token comes before so many outputs."""
    logprobs: Annotated[int, Between(-1, 20)] = -1
    """How many of the likeliest tokens are told beside the chosen one; -1: no log probability is told."""
    choice: Annotated[int, Between(0, 127)] = 0
    """Which of a request's n answers this is: they share the seed."""

    @property
    def looks_back(self) -> bool:
        """Whether the tokens so far matter to the next one other than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    """What the prefill worker measured of one stream; microseconds of its monotonic clock and byte counts."""

    queued_us: Count = 0
    """ACCEPT to the first chunk's start."""
    compute_us: Count = 0
    """First chunk's start to the last chunk's end."""
    num_chunks: Count = 0
    num_units: Count = 0
    sent_bytes: Count = 0
    hidden_bytes: Count = 0
    """Bytes whose send had completed when the last chunk's compute ended."""
    exposed_us: Count = 0
    """Last chunk's end to ADOPTED."""
    prompt_tokens: Count = 0
    """Prompt tokens computed here."""


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """What the decode worker measured of one stream; microseconds of its monotonic clock and byte counts."""

    adopt_us: Count = 0
    """GENERATE accepted to ADOPTED; 0 for a local stream."""
    decode_us: Count = 0
    """First token's emission to the last token's."""
    num_steps: Count = 0
    received_bytes: Count = 0
    num_units: Count = 0
    prompt_tokens: Count = 0
    """Prompt tokens computed here, whatever the reason."""


# --- down: ingress to worker ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """To decode: reserve, wait for the KV cache of `source` (or compute the prompt for `local`), then generate."""

    stream: StreamId
    attempt: Attempt
    dispatch: Count
    waited_ms: Milliseconds
    source: Incarnation
    """The prefill worker's incarnation; 0 when `local` names a reason."""
    local: LocalReason
    prompt: PackedTokens
    emitted: PackedTokens
    sampling: SamplingParams
    first_token_ms: Milliseconds
    progress_ms: Milliseconds
    explain: bool = False
    tenant: Tenant = b""
    priority: Priority = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """To prefill, after decode's ACCEPT: compute the prompt and ship its KV cache to `decode`."""

    stream: StreamId
    attempt: Attempt
    dispatch: Count
    waited_ms: Milliseconds
    decode: Incarnation
    skip_tokens: Count
    prompt: PackedTokens
    emitted: PackedTokens
    sampling: SamplingParams
    first_token_ms: Milliseconds
    explain: bool = False
    tenant: Tenant = b""
    priority: Priority = 0


@dataclass(frozen=True, slots=True)
class Abort:
    stream: StreamId
    attempt: Attempt
    reason: AbortReason


@dataclass(frozen=True, slots=True)
class Seen:
    """END or FAILED of this attempt has arrived; the worker may forget it."""

    stream: StreamId
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Position:
    stream: StreamId
    attempt: Attempt
    count: Count


@dataclass(frozen=True, slots=True)
class Resume:
    """complete=False: gaps, send again from `count`. complete=True: the first frame after a (re-)dial: abort all
    else."""

    positions: Annotated[tuple[Position, ...], Size(0, 65536)]
    complete: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Both ways, each HEARTBEAT_S, sent off the engine thread."""

    engine_idle_ms: Milliseconds
    """Worker: time since the engine thread last finished a turn of its loop. Ingress: 0."""


# --- up: worker to ingress ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accept:
    stream: StreamId
    attempt: Attempt
    skip_tokens: Count
    """Decode: tokens of the prompt that need not be shipped, whole blocks of it, less than all."""
    cached_tokens: Count
    """Known tokens that this worker has in its cache and will not compute."""


@dataclass(frozen=True, slots=True)
class Busy:
    stream: StreamId
    attempt: Attempt
    reason: BusyReason


@dataclass(frozen=True, slots=True)
class Delta:
    """`tokens` are the stream's output tokens from `position` on."""

    stream: StreamId
    attempt: Attempt
    position: Count
    tokens: Annotated[tuple[TokenId, ...], Size(0, MAX_TOKENS)]
    logprobs: Annotated[tuple[Logprobs, ...], Size(0, MAX_TOKENS)] = ()
    """One per token where the stream asks for them, else empty."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One frame per ingress and step."""

    deltas: Annotated[tuple[Delta, ...], Size(0, 65536)]


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """Prefill's END: the KV cache was adopted."""

    stream: StreamId
    attempt: Attempt
    timings: PrefillTimings


@dataclass(frozen=True, slots=True)
class End:
    """Decode's END: the stream is complete with `count` output tokens, those emitted by earlier attempts included."""

    stream: StreamId
    attempt: Attempt
    count: Count
    reason: FinishReason
    timings: DecodeTimings


@dataclass(frozen=True, slots=True)
class Failed:
    stream: StreamId
    attempt: Attempt
    stage: Stage
    reason: FailReason


@dataclass(frozen=True, slots=True)
class Explain:
    """Facts of one explained stream as a JSON object; informational, never acted on."""

    stream: StreamId
    attempt: Attempt
    role: Role
    facts: Annotated[bytes, Size(2, 64 << 10)]


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """Prompt tokens a worker has computed since it started, by reason."""

    routine: Count = 0
    """On prefill and colocated workers: the ordinary case. On decode workers this stays 0: KV arrives by transfer."""
    local: Count = 0
    resume: Count = 0
    preempt: Count = 0
    fallback: Count = 0


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's state; on change at most 50/s, at least 4/s."""

    state: WorkerState
    last_dispatch: Count
    """The newest dispatch number of this ingress that is counted in the figures below."""
    blocks_total: Count
    blocks_free: Count
    """Blocks that a reservation can have: nobody uses them. Cached ones are among them."""
    blocks_quarantined: Count
    running: Count
    waiting: Count
    """Reserved, not yet running."""
    queued_tokens: Count
    """Uncached prompt tokens accepted and not yet computed."""
    itl_us: Count
    """Moving average of the time between two decode steps; 0 when nothing decodes."""
    open_lanes: Annotated[tuple[Incarnation, ...], Size(0, 256)]
    """Decode: incarnations of the prefill workers that a warmed lane reaches."""
    computed_prompt: ComputedPrompt
    blocks_cached: Count = 0
    """Free blocks whose content a request may still find."""
    kv_over: Annotated[tuple[Annotated[str, Size(0, 160)], ...], Size(0, 16)] = ()
    """How KV moves to or from the peers of this worker, each way once, with the reason of the choice."""


@dataclass(frozen=True, slots=True)
class Cache:
    """What a request may find in this worker's prefix cache, as names of blocks; a hint, for the choice of a worker.

    In order: `is_whole` first forgets what was told before, then `removed` goes, then `added` comes.
    """

    is_whole: bool
    added: PackedNames
    removed: PackedNames


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker proves in the handshake. The membership is a hint; this is the truth."""

    incarnation: Incarnation
    role: Role
    model_id: Annotated[str, Size(1, 256)]
    model_digest: Annotated[str, Size(1, 128)]
    pid: Count
    ranks: Annotated[int, Between(1, 1024)]
    block_tokens: Annotated[int, Between(1, 4096)]
    blocks_total: Count
    max_context_tokens: Annotated[int, Between(1, MAX_TOKENS)]
    headroom_blocks: Annotated[int, Between(0, 4096)]
    """Pages reserved on decode beyond the known tokens', where the stream may still need them."""
    kv_bytes_per_token: Count
    windows: Annotated[tuple[Annotated[int, Between(1, 1 << 31)] | None, ...], Size(1, 1024)] = (None,)
    """Per state group the latest tokens that a token sees; None: all. A page takes a block of each group."""


@dataclass(frozen=True, slots=True)
class IngressIdentity:
    incarnation: Incarnation
    wanted: Incarnation
    """The worker incarnation the ingress means to reach; 0 = whoever answers."""


FRONT_CODEC = Codec(
    Generate, Prefill, Abort, Seen, Resume, Heartbeat,
    Accept, Busy, Tokens, PrefillEnd, End, Failed, Explain, Load, Cache,
    max_frame_bytes=4 << 20, max_array=MAX_TOKENS,
)  # fmt: skip
IDENTITY_CODEC = Codec(WorkerIdentity, IngressIdentity, max_frame_bytes=8 << 10, max_array=64)
DownMessage = Generate | Prefill | Abort | Seen | Resume | Heartbeat
UpMessage = Accept | Busy | Tokens | PrefillEnd | End | Failed | Explain | Load | Cache | Heartbeat


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Where a worker can be dialled: what the membership carries. A hint; the handshake is the truth."""

    role: Role
    incarnation: int
    host: str
    front_port: int
    kv_port: int
    """0 for workers that send no KV cache."""
