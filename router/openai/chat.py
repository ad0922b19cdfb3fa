"""/v1/chat/completions: a body to an `Ask`, and the documents of the answer. Pure."""

from collections.abc import Sequence

from pydantic import JsonValue

from router.errors import ApiError
from router.openai.ask import Ask, ChatPrompt, Piece, Usage
from router.openai.logprobs import describe_chat
from router.openai.sampling import read_chat_logprobs, read_sampling
from router.openai.schemas import ChatBody, Message, parse_body, parse_stops, tenant_of
from workers.protocol import FinishReason


def parse_chat(document: dict[str, JsonValue], max_stops: int, max_stop_chars: int) -> tuple[str, Ask]:
    """The model's name and the request. Raises `ApiError`."""
    body = parse_body(ChatBody, document)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "Set either 'max_tokens' or 'max_completion_tokens', not both."
        raise ApiError("invalid_request", message, param="max_tokens")
    has_new_name = body.max_completion_tokens is not None
    ask = Ask(
        endpoint="chat",
        prompt=ChatPrompt(tuple(_plain_message(m, f"messages[{i}]") for i, m in enumerate(body.messages))),
        max_tokens=body.max_completion_tokens if has_new_name else body.max_tokens,
        default_max_tokens=None,
        max_tokens_param="max_completion_tokens" if has_new_name else "max_tokens",
        sampling=read_sampling(body, read_chat_logprobs(body)),
        stops=parse_stops(body.stop, max_stops, max_stop_chars),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        num_choices=body.n or 1,
        priority=-(body.priority or 0),
        tenant=tenant_of(body),
    )
    return body.model, ask


def _plain_message(message: Message, where: str) -> dict[str, str]:
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, name) not in (None, []):
            raise ApiError(
                "unsupported", f"'{where}.{name}' is not supported by this server yet.", param=f"{where}.{name}"
            )
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _plain_content(message.content, f"{where}.content")}


def _plain_content(content: JsonValue, where: str) -> str:
    """A string as it is; text parts joined by a line break."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        message = f"Invalid '{where}': expected a string or a list of text parts."
        raise ApiError("invalid_request", message, param=where, code="invalid_type")
    texts: list[str] = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ApiError(
                "invalid_request", f"Invalid '{at}': expected an object with 'type'.", param=at, code="invalid_type"
            )
        if part["type"] != "text":
            raise ApiError(
                "unsupported", f"Invalid '{at}.type': this model takes parts of type 'text' only.", param=f"{at}.type"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise ApiError(
                "invalid_request", f"Invalid '{at}.text': expected a string.", param=f"{at}.text", code="invalid_type"
            )
        texts.append(text)
    return "\n".join(texts)


class ChatShape:
    """Documents of one chat request; the role rides in the first chunk of each choice."""

    def __init__(self, head: dict[str, object], include_usage: bool, has_logprobs: bool) -> None:
        self._head = head | {"object": "chat.completion.chunk"}
        self._tail: dict[str, object] = {"usage": None} if include_usage else {}
        self._has_logprobs = has_logprobs
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[tuple[Piece, FinishReason]], usage: Usage) -> dict[str, object]:
        listed = [
            {
                "index": index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece),
                "finish_reason": reason,
            }
            for index, (piece, reason) in enumerate(choices)
        ]
        return self._head | {"object": "chat.completion", "choices": listed, "usage": usage.body()}

    def chunk(self, index: int, piece: Piece) -> dict[str, object]:
        return self._choice(index, {"content": piece.text}, self._logprobs(piece), None)

    def finish(self, index: int, reason: FinishReason) -> dict[str, object]:
        return self._choice(index, {}, None, reason)

    def usage(self, usage: Usage) -> dict[str, object]:
        return self._head | {"choices": [], "usage": usage.body()}

    def _logprobs(self, piece: Piece) -> dict[str, object] | None:
        return describe_chat(piece.entries) if self._has_logprobs else None

    def _choice(
        self, index: int, delta: dict[str, object], logprobs: dict[str, object] | None, reason: FinishReason | None
    ) -> dict[str, object]:
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": ""} | delta
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"choices": [choice]} | self._tail
