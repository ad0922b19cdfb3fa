"""Server-sent events as OpenAI writes them. Pure."""

import json

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def encode_json(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encode_event(document: object) -> bytes:
    return b"data: " + encode_json(document) + b"\n\n"
