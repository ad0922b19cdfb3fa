"""/v1/completions: a body to an `Ask`, and the documents of the answer. Pure."""

from collections.abc import Sequence
from typing import cast

from pydantic import JsonValue

from router.errors import ApiError
from router.openai.ask import Ask, Piece, Prompt, TextPrompt, TokenPrompt, Usage
from router.openai.logprobs import describe_completion
from router.openai.sampling import NO_LOGPROBS, read_sampling
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
        sampling=read_sampling(body, NO_LOGPROBS if body.logprobs is None else body.logprobs),
        stops=parse_stops(body.stop, max_stops, max_stop_chars),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        num_choices=body.n or 1,
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
    """Documents of one text request."""

    def __init__(self, head: dict[str, object], include_usage: bool, has_logprobs: bool) -> None:
        self._head = head | {"object": "text_completion"}
        self._tail: dict[str, object] = {"usage": None} if include_usage else {}
        self._has_logprobs = has_logprobs
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[tuple[Piece, FinishReason]], usage: Usage) -> dict[str, object]:
        listed = [self._choice(index, piece, reason) for index, (piece, reason) in enumerate(choices)]
        return self._head | {"choices": listed, "usage": usage.body()}

    def chunk(self, index: int, piece: Piece) -> dict[str, object]:
        return self._head | {"choices": [self._choice(index, piece, None)]} | self._tail

    def finish(self, index: int, reason: FinishReason) -> dict[str, object]:
        return self._head | {"choices": [self._choice(index, Piece(""), reason)]} | self._tail

    def usage(self, usage: Usage) -> dict[str, object]:
        return self._head | {"choices": [], "usage": usage.body()}

    def _choice(self, index: int, piece: Piece, reason: FinishReason | None) -> dict[str, object]:
        logprobs = None
        if self._has_logprobs and (piece.entries or reason is None):
            offset = self._offsets.get(index, 0)
            logprobs = describe_completion(piece.entries, offset)
            self._offsets[index] = offset + sum(len(entry.chosen.text) for entry in piece.entries)
        return {"text": piece.text, "index": index, "logprobs": logprobs, "finish_reason": reason}
