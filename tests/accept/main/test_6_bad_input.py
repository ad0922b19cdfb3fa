"""Line 6: bad input gets 400, 404 or 413 in OpenAI's shape, never a 5xx, and never costs a worker."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support.real_server import RealServer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "smollm2-135m", "messages": [USER], "max_tokens": 2, **fields}).encode()


def text(prompt: Any) -> bytes:
    return json.dumps({"model": "smollm2-135m", "prompt": prompt, "max_tokens": 2}).encode()


def with_raw(field: str, raw: bytes) -> bytes:
    return chat(**{field: "RAW"}).replace(b'"RAW"', raw)


CASES: dict[str, tuple[str, Callable[[], bytes], int, str | None]] = {
    "wrong JSON": (CHAT, lambda: b'{"model": "smollm2-135m", "messages": [', 400, None),
    "empty body": (CHAT, lambda: b"", 400, None),
    "no object": (CHAT, lambda: b"[1, 2]", 400, None),
    "unknown model": (CHAT, lambda: chat(model="gpt-4"), 404, "model"),
    "no model": (CHAT, lambda: json.dumps({"messages": [USER]}).encode(), 400, "model"),
    "prompt over the context": (CHAT, lambda: chat(messages=[{**USER, "content": "word " * 20_000}]), 400, "messages"),
    "max_tokens 0": (CHAT, lambda: chat(max_tokens=0), 400, "max_tokens"),
    "max_tokens negative": (CHAT, lambda: chat(max_tokens=-5), 400, "max_tokens"),
    "max_tokens huge": (CHAT, lambda: chat(max_tokens=10**9), 400, "max_tokens"),
    "max_tokens over 64 bits": (CHAT, lambda: chat(max_tokens=10**30), 400, "max_tokens"),
    "max_tokens a text": (CHAT, lambda: chat(max_tokens="many"), 400, "max_tokens"),
    "n 0": (CHAT, lambda: chat(n=0), 400, "n"),
    "n 1000": (CHAT, lambda: chat(n=1000), 400, "n"),
    "empty messages": (CHAT, lambda: chat(messages=[]), 400, "messages"),
    "messages a text": (CHAT, lambda: chat(messages="Hi"), 400, "messages"),
    "unknown role": (CHAT, lambda: chat(messages=[{"role": "wizard", "content": "Hi"}]), 400, "messages[0].role"),
    "10 MB body": (CHAT, lambda: chat(messages=[{"role": "user", "content": "x" * 10_000_000}]), 413, None),
    "JSON 50,000 deep": (CHAT, lambda: b"[" * 50_000 + b"]" * 50_000, 400, None),
    "a field 50,000 deep": (CHAT, lambda: with_raw("metadata", b'{"a":' * 50_000 + b"1" + b"}" * 50_000), 400, None),
    "invalid UTF-8": (CHAT, lambda: chat().replace(b"Hi", b"\xff\xfe\x80"), 400, None),
    "lone surrogate": (CHAT, lambda: chat().replace(b"Hi", b"\\ud800"), 400, None),
    "NaN temperature": (CHAT, lambda: with_raw("temperature", b"NaN"), 400, None),
    "infinite temperature": (CHAT, lambda: with_raw("temperature", b"1e999"), 400, None),
    "temperature 3": (CHAT, lambda: chat(temperature=3), 400, "temperature"),
    "top_p 2": (CHAT, lambda: chat(top_p=2), 400, "top_p"),
    "300 stop strings": (CHAT, lambda: chat(stop=["a"] * 300), 400, "stop"),
    "empty stop string": (CHAT, lambda: chat(stop=[""]), 400, "stop[0]"),
    "seed a text": (CHAT, lambda: chat(seed="x"), 400, "seed"),
    "token ids outside the vocabulary": (TEXT, lambda: text([1, 10**6]), 400, "prompt[1]"),
    "negative token ids": (TEXT, lambda: text([-1]), 400, "prompt[0]"),
    "an empty prompt": (TEXT, lambda: text(""), 400, "prompt"),
    "no such path": ("/v1/nothing", lambda: chat(), 404, None),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _workers_survive(real_server: RealServer) -> Any:
    real_server.wait_healthy()
    before = {w["pid"] for w in real_server.workers()}
    yield
    real_server.wait_idle()
    assert {w["pid"] for w in real_server.workers()} == before
    answer = httpx.post(real_server.url + CHAT, content=chat(), timeout=60, trust_env=False)
    assert answer.status_code == 200


@pytest.mark.parametrize("name", CASES)
def test_bad_input(real_server: RealServer, name: str) -> None:
    path, make, status, param = CASES[name]
    answer = httpx.post(real_server.url + path, content=make(), timeout=60, trust_env=False)
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    if param is not None:
        assert error["param"] == param


def test_a_wrong_method_is_405_in_the_same_shape(real_server: RealServer) -> None:
    answer = httpx.get(real_server.url + CHAT, timeout=60, trust_env=False)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
