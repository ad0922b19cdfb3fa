"""Bodies that clients send: what is refused, and the field that the refusal names."""

import json

import pytest

from router.config import RouterConfig
from router.context import plan_sampling
from router.errors import FACES, ApiError
from router.openai.ask import ChatPrompt, TextPrompt, TokenPrompt
from router.openai.chat import parse_chat
from router.openai.completions import parse_completion
from router.openai.schemas import parse_json_object
from workers.protocol import TokenBias

USER = {"role": "user", "content": "hi"}


def chat(**fields: object):
    return parse_chat({"model": "m", "messages": [USER]} | fields, 4, 64)


def refused(call, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    return caught.value


def test_what_is_not_named_is_left_to_the_model_s_defaults() -> None:
    model, ask = chat()
    assert model == "m"
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.max_tokens, ask.sampling.seed, ask.stops, ask.stream) == (
        None,
        None,
        None,
        None,
        (),
        False,
    )


class Words:
    eos_ids = (2,)
    vocab_size = 50


WORDS = Words()
CONFIG = RouterConfig(model_id="m", model_path="")


def test_every_sampling_setting_reaches_the_workers() -> None:
    _, ask = chat(
        presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5, logit_bias={"7": -100, "49": 1.5},
        min_tokens=3, stop_token_ids=[9, 2], logprobs=True, top_logprobs=4, max_tokens=8, seed=5,
    )  # fmt: skip
    params = plan_sampling(ask, 5, 100, WORDS, CONFIG)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.25, 1.5)
    assert params.logit_bias == (TokenBias(7, -100.0), TokenBias(49, 1.5))
    assert (params.min_tokens, params.stop_token_ids, params.logprobs) == (3, (2, 9), 4)
    _, text = parse_completion({"model": "m", "prompt": "a", "logprobs": 0, "ignore_eos": True}, 4, 64)
    params = plan_sampling(text, 5, 100, WORDS, CONFIG)
    assert (params.logprobs, params.stop_token_ids) == (0, ())
    assert plan_sampling(chat()[1], 5, 100, WORDS, CONFIG).logprobs == -1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"stop_token_ids": [50]}, "stop_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_what_the_model_does_not_know_is_refused(fields: dict[str, object], param: str) -> None:
    _, ask = chat(**fields)
    error = refused(lambda: plan_sampling(ask, 5, 100, WORDS, CONFIG))
    assert (error.status, error.param) == (400, param)


def test_the_model_s_defaults_hold_where_a_request_names_none() -> None:
    config = RouterConfig(model_id="m", model_path="", default_temperature=0.2, default_top_p=0.9)
    _, silent = chat()
    _, outspoken = chat(temperature=0, top_p=1)
    params = [plan_sampling(ask, 5, 100, WORDS, config) for ask in (silent, outspoken)]
    assert [(p.temperature, p.top_p) for p in params] == [(0.2, 0.9), (0.0, 1.0)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 1.0}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ["a"] * 300}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": 3}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER, {"role": "alien", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 40}, "stop_token_ids"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"flux": 1}, "flux"),
        ({"priority": 101}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"model": None}, "model"),
    ],
)
def test_a_refused_chat_field_is_named(fields: dict[str, object], param: str) -> None:
    error = refused(chat, **fields)
    assert (error.status, error.param) == (400, param)
    assert error.message
    assert error.code


def test_priority_and_salt_are_taken_as_vllm_has_them() -> None:
    _, ask = chat(priority=-2, cache_salt="mine")
    assert (ask.priority, len(ask.tenant)) == (2, 32), "lower goes first, higher does inside"
    assert chat()[1].tenant == b""
    assert chat(cache_salt="other")[1].tenant != ask.tenant
    _, text = parse_completion({"model": "m", "prompt": "x", "priority": 5, "cache_salt": "mine"}, 4, 64)
    assert (text.priority, text.tenant) == (-5, ask.tenant)


def test_a_missing_field_is_named() -> None:
    error = refused(lambda: parse_chat({"model": "m"}, 4, 64))
    assert (error.param, error.code) == ("messages", "missing_required_parameter")


def test_neutral_values_of_unbuilt_fields_pass() -> None:
    _, ask = chat(
        n=1,
        logprobs=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        user="u",
        metadata={},
        store=False,
        stop=None,
    )
    assert ask == chat()[1]


def test_an_answer_of_the_openai_client_can_be_sent_back() -> None:
    """Its dump carries nulls and empty lists for what was not said."""
    unsaid = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
    said = {"role": "assistant", "content": "yes", "annotations": []} | unsaid
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    _, ask = chat(messages=[USER, said, parts])
    assert isinstance(ask.prompt, ChatPrompt)
    assert [m["content"] for m in ask.prompt.messages] == ["hi", "yes", "a\nb"]


def test_developer_messages_are_system_messages() -> None:
    _, ask = chat(messages=[{"role": "developer", "content": "x"}])
    assert isinstance(ask.prompt, ChatPrompt)
    assert ask.prompt.messages[0]["role"] == "system"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", TextPrompt("a")), (["a"], TextPrompt("a")), ([1, 2], TokenPrompt((1, 2))), ([[1, 2]], TokenPrompt((1, 2)))],
)
def test_prompts_of_completions(prompt: object, expected: object) -> None:
    _, ask = parse_completion({"model": "m", "prompt": prompt}, 4, 64)
    assert ask.prompt == expected
    assert (ask.max_tokens, ask.default_max_tokens) == (None, 16)


@pytest.mark.parametrize("prompt", ["", [], None, 3, [1.5], [True], ["a", "b"], [[1], [2]], [""], {"a": 1}, [1, "a"]])
def test_refused_prompts_of_completions(prompt: object) -> None:
    error = refused(lambda: parse_completion({"model": "m", "prompt": prompt}, 4, 64))
    assert (error.status, error.param) == (400, "prompt")


@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"best_of": 2}, {"logprobs": 6}, {"logprobs": -1}, {"suffix": "x"}, {"max_tokens": 0}]
)
def test_refused_fields_of_completions(fields: dict[str, object]) -> None:
    error = refused(lambda: parse_completion({"model": "m", "prompt": "a"} | fields, 4, 64))
    assert (error.status, error.param) == (400, next(iter(fields)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b"[" * 50_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    error = refused(lambda: parse_json_object(raw))
    assert (error.status, error.code) == (400, "invalid_json")


def test_every_error_has_the_openai_shape() -> None:
    for kind in FACES:
        body = json.loads(json.dumps(ApiError(kind, "text").body()))
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert 400 <= ApiError(kind, "text").status < 600
