"""The bodies that clients may send: OpenAI's fields, strict types, ranges, and errors that name the field.

A field that we know and have not built is accepted at its neutral value and refused by name at any other. A field that
nobody knows is refused. Beyond OpenAI's, as vLLM has them: `top_k`, `min_p`, `ignore_eos`,
`priority` (lower goes first) and `cache_salt` (cached prefixes are shared only between requests of one salt).
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails, from_json

from router.errors import ApiError
from workers.protocol import MAX_PRIORITY

Role = Literal["system", "developer", "user", "assistant"]
MAX_INT64 = (1 << 63) - 1


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(_Strict):
    """What chat and text completions share."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    ignore_eos: bool | None = None
    stop: JsonValue = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 17)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=32)] | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class Message(_Strict):
    role: Role
    content: JsonValue = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[JsonValue] | None = None
    reasoning_content: str | None = None
    tool_calls: JsonValue = None
    tool_call_id: JsonValue = None
    function_call: JsonValue = None
    audio: JsonValue = None


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, JsonValue] | None = None
    tools: list[JsonValue] | None = None
    tool_choice: JsonValue = None
    parallel_tool_calls: bool | None = None
    functions: list[JsonValue] | None = None
    function_call: JsonValue = None
    modalities: list[str] | None = None
    audio: JsonValue = None
    prediction: JsonValue = None
    web_search_options: JsonValue = None
    moderation: JsonValue = None
    reasoning_effort: JsonValue = None
    verbosity: JsonValue = None
    metadata: dict[str, JsonValue] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonValue = None


class CompletionBody(SamplingBody):
    prompt: JsonValue
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: str | None = None


NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
"""Values, besides null, at which a field that is not built changes nothing."""

_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "too_short": "empty_array",
    "too_long": "array_above_max_length",
    "literal_error": "invalid_value",
    "greater_than_equal": "below_min_value",
    "less_than_equal": "above_max_value",
    "finite_number": "invalid_value",
}
_Body = TypeVar("_Body", bound=SamplingBody)
_Model = TypeVar("_Model", bound=BaseModel)


def parse_json_object(raw: bytes) -> dict[str, JsonValue]:
    """The JSON object in `raw`. Raises `ApiError` on anything else: bad UTF-8, NaN, or over 200 brackets open at
    once.
    """
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError("invalid_json", f"The body is not valid JSON: {error}.") from None
    if not isinstance(document, dict):
        raise ApiError("invalid_json", f"The body must be a JSON object, got {type(document).__name__}.")
    return document


def parse_body(cls: type[_Body], document: dict[str, JsonValue]) -> _Body:
    """A checked body with every unbuilt field at its neutral value. Raises `ApiError` that names the first field at
    fault.
    """
    body = check_fields(cls, document)
    refuse_unbuilt(body, "")
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            "invalid_request", "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return body


def check_fields(cls: type[_Model], document: dict[str, JsonValue]) -> _Model:
    """The document as `cls`. Raises `ApiError` that names the first field at fault."""
    try:
        return cls.model_validate(document)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=True, include_input=False)[0]) from None


def refuse_unbuilt(body: BaseModel, prefix: str) -> None:
    """Raises `ApiError` for the first field of NEUTRAL that holds another value."""
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is None or any(value == n and isinstance(value, type(n)) for n in neutral):
            continue
        raise ApiError(
            "unsupported", f"'{prefix}{name}' is not supported by this server yet; leave it out.", param=prefix + name
        )


def tenant_of(body: SamplingBody) -> bytes:
    """Whose cached prefixes this request shares: b"" without a salt, else the salt's digest."""
    return hashlib.sha256(body.cache_salt.encode()).digest() if body.cache_salt else b""


def find_param(location: Sequence[int | str]) -> str | None:
    """('messages', 0, 'role') -> messages[0].role"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or None


def _refusal(detail: ErrorDetails) -> ApiError:
    param = find_param(detail["loc"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        return ApiError("invalid_request", f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    message = f"Invalid '{param}': {detail['msg']}."
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    return ApiError("invalid_request", message, param=param, code=code)


def parse_stops(value: JsonValue, max_strings: int, max_chars: int) -> tuple[str, ...]:
    """null, a string or a list of up to `max_strings` strings of 1 to `max_chars` characters. Raises `ApiError`."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise ApiError(
            "invalid_request",
            "Invalid 'stop': expected a string or a list of strings.",
            param="stop",
            code="invalid_type",
        )
    if len(stops) > max_strings:
        message = f"Invalid 'stop': expected at most {max_strings} strings, got {len(stops)}."
        raise ApiError("invalid_request", message, param="stop", code="array_above_max_length")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= max_chars:
            param = "stop" if isinstance(value, str) else f"stop[{index}]"
            raise ApiError(
                "invalid_request", f"Invalid '{param}': expected a string of 1 to {max_chars} characters.", param=param
            )
    return tuple(str(stop) for stop in stops)
