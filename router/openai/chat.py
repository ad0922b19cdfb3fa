"""/v1/chat/completions: a body to an `Ask`, and the documents of the answer. Pure."""

from pydantic import JsonValue

from router.errors import ApiError
from router.openai.ask import Ask, ChatPrompt, Usage
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
    """Documents of one chat answer; the role rides in the first chunk."""

    def __init__(self, answer_id: str, model: str, created: int, include_usage: bool) -> None:
        self._head: dict[str, object] = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._tail: dict[str, object] = {"usage": None} if include_usage else {}
        self._is_first = True

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> dict[str, object]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": usage.body()}

    def chunk(self, text: str) -> dict[str, object]:
        return self._choice(self._with_role({"content": text}), None)

    def finish(self, reason: FinishReason) -> dict[str, object]:
        return self._choice(self._with_role({}), reason)

    def usage(self, usage: Usage) -> dict[str, object]:
        return self._head | {"choices": [], "usage": usage.body()}

    def _with_role(self, delta: dict[str, object]) -> dict[str, object]:
        if not self._is_first:
            return delta
        self._is_first = False
        return {"role": "assistant", "content": ""} | delta

    def _choice(self, delta: dict[str, object], reason: FinishReason | None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._head | {"choices": [choice]} | self._tail
