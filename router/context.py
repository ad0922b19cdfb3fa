"""The facts of one request: its trail through the steps, its deadlines, its sampling settings, its log line. Pure."""

import math
import secrets
from dataclasses import dataclass, field
from typing import Protocol

from router.answer import Answer
from router.config import RouterConfig
from router.errors import ApiError
from router.openai.ask import Ask
from router.stream import Deadlines, LiveStream, Marks
from workers.protocol import SamplingParams, TokenBias


@dataclass(slots=True)
class Trail:
    """What is known of a request so far; `rendered` never leaves but to the one who asks to explain it."""

    request: str
    arrived: float
    tokenized: float = 0.0
    streams: list[LiveStream] = field(default_factory=list)
    """One per choice that has begun."""
    answers: list[Answer] = field(default_factory=list)
    verdict: str = "ok"
    rendered: str = field(default="", repr=False)
    prompt: list[int] = field(default_factory=list, repr=False)


def find_deadlines(config: RouterConfig, arrived: float, timeout: bytes | None) -> Deadlines:
    """`timeout` is the header x-baton-timeout-s. Raises `ApiError` when it is no number of seconds in range."""
    total_at = None
    if timeout is not None:
        try:
            seconds = math.nan if b"_" in timeout else float(timeout)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= config.max_total_s:
            message = f"Invalid 'x-baton-timeout-s': expected seconds over 0 and up to {config.max_total_s:g}."
            raise ApiError("invalid_request", message, param="x-baton-timeout-s")
        total_at = arrived + seconds
    return Deadlines(arrived + config.first_token_s, config.progress_s, total_at)


class Vocabulary(Protocol):
    """What the model's tokenizer knows of ids."""

    eos_ids: tuple[int, ...]
    vocab_size: int


def plan_sampling(
    ask: Ask, num_prompt: int, limit: int, vocabulary: Vocabulary, config: RouterConfig
) -> SamplingParams:
    """`limit`: prompt and output tokens that fit together. Raises `ApiError` where what was asked for does not fit."""
    max_tokens, want = _plan_length(ask, num_prompt, limit), ask.sampling
    if want.min_tokens > max_tokens:
        message = f"'min_tokens' is {want.min_tokens}, over the {max_tokens} tokens that the answer may have."
        raise ApiError("invalid_request", message, param="min_tokens")
    for param, ids in (("logit_bias", [one for one, _ in want.logit_bias]), ("stop_token_ids", want.stop_token_ids)):
        if outside := [token for token in ids if token >= vocabulary.vocab_size]:
            message = (
                f"Invalid '{param}': token ids of this model are 0 to {vocabulary.vocab_size - 1}, got {outside[0]}."
            )
            raise ApiError("invalid_request", message, param=param)
    return SamplingParams(
        temperature=config.default_temperature if want.temperature is None else want.temperature,
        top_k=want.top_k,
        top_p=config.default_top_p if want.top_p is None else want.top_p,
        min_p=want.min_p,
        seed=secrets.randbits(63) if want.seed is None else want.seed & ((1 << 63) - 1),
        max_tokens=max_tokens,
        stop_token_ids=tuple(dict.fromkeys((() if want.ignore_eos else vocabulary.eos_ids) + want.stop_token_ids)),
        repetition_penalty=want.repetition_penalty,
        presence_penalty=want.presence_penalty,
        frequency_penalty=want.frequency_penalty,
        logit_bias=tuple(TokenBias(token, bias) for token, bias in want.logit_bias),
        min_tokens=want.min_tokens,
        logprobs=want.logprobs,
    )


def _plan_length(ask: Ask, num_prompt: int, limit: int) -> int:
    """Output tokens at most. Raises `ApiError`."""
    if num_prompt >= limit:
        message = f"This model's maximum context length is {limit} tokens; your prompt alone has {num_prompt}."
        param = "messages" if ask.endpoint == "chat" else "prompt"
        raise ApiError("context_length", message, param=param)
    room = limit - num_prompt
    if ask.max_tokens is not None and ask.max_tokens > room:
        message = (
            f"This model's maximum context length is {limit} tokens; you asked for {num_prompt} in the prompt and "
            f"{ask.max_tokens} in '{ask.max_tokens_param}'."
        )
        raise ApiError("context_length", message, param=ask.max_tokens_param)
    return ask.max_tokens or min(room, ask.default_max_tokens or room)


def describe_end(trail: Trail, path: str, status: int, now: float) -> str:
    """The one log line of a request: outcome, counts and stage times in milliseconds; no text of the client's."""
    stream = trail.streams[0] if trail.streams else None
    marks = stream.marks if stream is not None else Marks(trail.arrived)
    granted = marks.prefill_accepted or marks.decode_accepted
    facts = {
        "id": trail.request,
        "path": path,
        "status": status,
        "outcome": trail.verdict,
        "stream": stream.id.hex()[:8] if stream else "-",
        "retries": sum(one.num_retries for one in trail.streams),
        "prompt_tokens": stream.num_prompt if stream else 0,
        "output_tokens": sum(answer.num_tokens for answer in trail.answers),
        "tokenize_ms": elapsed_ms(trail.arrived, trail.tokenized),
        "queue_ms": elapsed_ms(marks.queued, marks.dispatched),
        "grant_ms": elapsed_ms(marks.dispatched, granted),
        "ttft_ms": elapsed_ms(trail.arrived, marks.first_token),
        "decode_ms": elapsed_ms(marks.first_token, marks.last_token),
        "total_ms": elapsed_ms(trail.arrived, now),
    }
    return "request " + " ".join(f"{key}={value}" for key, value in facts.items())


def elapsed_ms(begin: float, end: float) -> float:
    """0 where one of the two did not happen."""
    return round(max(end - begin, 0.0) * 1000, 1) if begin and end else 0.0
