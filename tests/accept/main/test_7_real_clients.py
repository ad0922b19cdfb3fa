"""Line 7 (and the text half of line 1): the real clients, `openai` and `curl`, against the real cluster."""

import json
import subprocess
import time

import openai
import pytest

from tests.support.raw_client import RawStream
from tests.support.real_server import RealServer
from tests.support.serve_process import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
SKY = [{"role": "user", "content": "Why is the sky blue?"}]


@pytest.fixture(scope="module")
def client(real_server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=real_server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def curl(*arguments: str) -> str:
    done = subprocess.run(["curl", "-sS", *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_the_command_of_the_readme_streams_a_sensible_answer(real_server: RealServer) -> None:
    body = {"model": "smollm2-135m", "stream": True, "messages": SKY, "temperature": 0, "max_tokens": 60}
    output = curl("-N", f"{real_server.url}/v1/chat/completions", "-d", json.dumps(body))
    events = [line.removeprefix("data: ") for line in output.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert chunks[0]["delta"]["role"] == "assistant"
    assert chunks[0]["delta"]["content"], "the role rides with the first token"
    assert sum("role" in c["delta"] for c in chunks) == 1
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["length"]
    text = "".join(c["delta"].get("content", "") for c in chunks)
    assert any(word in text.lower() for word in ("scatter", "light", "atmosphere")), text
    assert len(chunks) > 40, "the answer came in a few lumps"
    whole = json.loads(curl(f"{real_server.url}/v1/chat/completions", "-d", json.dumps({**body, "stream": False})))
    assert whole["choices"][0]["message"]["content"] == text, "streamed and whole answers differ"


def test_curl_may_send_any_content_type(real_server: RealServer) -> None:
    body = json.dumps({"model": "smollm2-135m", "messages": SKY, "max_tokens": 2})
    for kind in ("text/plain", "application/json", "application/octet-stream"):
        answer = json.loads(curl(f"{real_server.url}/v1/chat/completions", "-H", f"Content-Type: {kind}", "-d", body))
        assert answer["usage"]["completion_tokens"] == 2


def test_a_page_of_another_origin_is_refused(real_server: RealServer) -> None:
    output = curl("-w", "\n%{http_code}", "-H", "Origin: https://evil.example", f"{real_server.url}/v1/models")
    body, status = output.rsplit("\n", 1)
    assert status == "403"
    assert json.loads(body)["error"]["code"] == "foreign_origin"


def test_openai_chat_whole_and_streamed_are_equal(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2-135m", messages=SKY, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model="smollm2-135m", messages=SKY, temperature=0, max_tokens=24, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_openai_completions_models_and_seeds(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["smollm2-135m"]
    answers = [
        client.completions.create(
            model="smollm2-135m", prompt="The capital of France is", max_tokens=8, temperature=0.9, seed=7
        )
        for _ in range(2)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_openai_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=SKY)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model="smollm2-135m", messages=SKY, temperature=3)
    assert invalid.value.param == "temperature"


def test_a_client_that_hangs_up_half_way_frees_the_work_within_two_steps(real_server: RealServer) -> None:
    body = {"model": "smollm2-135m", "stream": True, "max_tokens": 1000, "ignore_eos": True, "messages": SKY}
    stream = RawStream(real_server.port, "/v1/chat/completions", body)
    for _, _ in zip(range(10), stream.events(), strict=False):
        continue
    decode = real_server.worker("decode")
    assert decode["running"] == 1
    stream.hang_up()
    hung_up_at = time.monotonic()
    wait_for("the work ends", lambda: real_server.worker("decode")["blocks_in_use"] == 0, 5.0)
    assert time.monotonic() - hung_up_at < 1.5, "decode worked on for many steps"
    real_server.wait_idle()
