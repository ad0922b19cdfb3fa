"""/v1/completions: a body to an `Ask`, and the documents of the answer. Pure."""

from typing import cast

from pydantic import JsonValue

from router.errors import ApiError
from router.openai.ask import Ask, Prompt, TextPrompt, TokenPrompt, Usage
from router.openai.schemas import CompletionBody, parse_body, parse_stops, tenant_of
from workers.protocol import FinishReason

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this endpoint."""


def parse_completion(document: dict[str, JsonValue], max_stops: int, max_stop_chars: int) -> tuple[str, Ask]:
    """The model's name and the request. Raises `ApiError`."""
    body = parse_body(CompletionBody, document)
    ask = Ask(
        endpoint="completions",
        prompt=_parse_prompt(body.prompt),
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        max_tokens_param="max_tokens",
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
        stops=parse_stops(body.stop, max_stops, max_stop_chars),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        priority=-(body.priority or 0),
        tenant=tenant_of(body),
    )
    return body.model, ask


def _parse_prompt(value: JsonValue) -> Prompt:
    """A string, a list of ids, or a list that holds one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return TextPrompt(value)
    if isinstance(value, list) and value:
        if all(type(v) is int for v in value):
            return TokenPrompt(tuple(cast("list[int]", value)))
        if all(isinstance(v, str | list) for v in value):
            message = f"'prompt' holds {len(value)} prompts; this server takes one per request."
            raise ApiError("unsupported", message, param="prompt")
    message = "Invalid 'prompt': expected a non-empty string or list of token ids."
    raise ApiError("invalid_request", message, param="prompt", code="invalid_type")


class CompletionShape:
    """Documents of one text answer."""

    def __init__(self, answer_id: str, model: str, created: int, include_usage: bool) -> None:
        self._head: dict[str, object] = {
            "id": answer_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._tail: dict[str, object] = {"usage": None} if include_usage else {}

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> dict[str, object]:
        return self._choice(text, reason) | {"usage": usage.body()}

    def chunk(self, text: str) -> dict[str, object]:
        return self._choice(text, None) | self._tail

    def finish(self, reason: FinishReason) -> dict[str, object]:
        return self._choice("", reason) | self._tail

    def usage(self, usage: Usage) -> dict[str, object]:
        return self._head | {"choices": [], "usage": usage.body()}

    def _choice(self, text: str, reason: FinishReason | None) -> dict[str, object]:
        return self._head | {"choices": [{"text": text, "index": 0, "logprobs": None, "finish_reason": reason}]}
