"""How a request wants its tokens drawn: the fields that both endpoints share, checked. Pure."""

from dataclasses import dataclass

from router.errors import ApiError
from router.openai.schemas import ChatBody, SamplingBody

NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingAsk:
    """Every field in range; whether token ids exist in the model is still unchecked."""

    temperature: float | None = None
    top_p: float | None = None
    """None: the model's default, which `RouterConfig` carries."""
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = NO_LOGPROBS
    """How many of the likeliest tokens are told beside the chosen one."""


def read_sampling(body: SamplingBody, logprobs: int) -> SamplingAsk:
    """Raises `ApiError` for a bias of something that is no token id."""
    return SamplingAsk(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=tuple((_read_id(name), float(bias)) for name, bias in (body.logit_bias or {}).items()),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
    )


def _read_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        message = f"Invalid 'logit_bias': its keys are token ids, and {name[:32]!r} is none."
        raise ApiError("invalid_request", message, param="logit_bias")
    return int(name)


def read_chat_logprobs(body: ChatBody) -> int:
    """`top_logprobs` needs `logprobs`, as OpenAI has it. Raises `ApiError`."""
    if body.top_logprobs is not None and not body.logprobs:
        message = "'top_logprobs' is only allowed when 'logprobs' is true."
        raise ApiError("invalid_request", message, param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else NO_LOGPROBS
