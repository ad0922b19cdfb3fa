"""Sampling settings and log probabilities through the disaggregated path as a client sees them, and transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.support.house import House, open_house
from tests.support.oracle import load_oracle, make_prompts

pytestmark = [pytest.mark.numerics, pytest.mark.integration, pytest.mark.timeout(600)]
NUM_TOKENS = 16
EOS = 2


@pytest.fixture(scope="module")
def house(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("house"), smollm2, {}, {}) as opened:
        yield opened


@pytest.fixture
def prompt(smollm2: Path) -> tuple[int, ...]:
    return make_prompts(smollm2, (65,))[0]


def complete(house: House, prompt: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    body = {"model": "test-model", "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    answer = httpx.post(f"{house.door.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def generate(model_path: Path, prompt: tuple[int, ...], **settings: Any) -> tuple[list[int], torch.Tensor]:
    """The oracle's tokens and the log softmax of its raw logits `[tokens, vocab]`."""
    model = load_oracle(model_path)
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NUM_TOKENS, output_logits=True, return_dict_in_generate=True, **settings,
        )  # fmt: skip
    logits = torch.cat([step.float() for step in result.logits])
    return result.sequences[0, len(prompt) :].tolist(), torch.log_softmax(logits.double(), dim=-1)


def test_log_probabilities_are_those_of_the_model(house: House, smollm2: Path, prompt: Any) -> None:
    """The first token's come from prefill, the others from decode."""
    tokens, logprobs = generate(smollm2, prompt)
    told = complete(house, prompt, logprobs=5)["logprobs"]
    wanted = [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]
    assert told["token_logprobs"] == pytest.approx(wanted, abs=2e-4)
    for row, top in zip(logprobs, told["top_logprobs"], strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(5).values.tolist(), abs=2e-4)
    assert len(told["tokens"]) == len(told["text_offset"]) == NUM_TOKENS


def test_streamed_chunks_carry_every_log_probability_once(house: House, prompt: Any) -> None:
    import openai

    with openai.OpenAI(base_url=house.door.url + "/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "Count: 1, 2, 3 \N{SLIGHTLY SMILING FACE}"}]
        ask: dict[str, Any] = {"model": "test-model", "messages": messages, "temperature": 0, "max_tokens": 24,
                               "logprobs": True, "top_logprobs": 2}  # fmt: skip
        whole = client.chat.completions.create(**ask).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or ()]
    assert whole.logprobs is not None
    assert whole.logprobs.content == streamed
    text = b"".join(bytes(entry.bytes or []) for entry in streamed).decode()
    assert text == whole.message.content == "".join(chunk.delta.content or "" for chunk in chunks)


def test_penalties_biases_and_minimum_lengths(house: House, smollm2: Path, prompt: Any) -> None:
    plain, _ = generate(smollm2, prompt)
    text = complete(house, prompt)["text"]
    for settings, ours in (
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"sequence_bias": [[[plain[0]], -100.0]]}, {"logit_bias": {str(plain[0]): -100}}),
        ({"suppress_tokens": plain[:3]}, {"logit_bias": dict.fromkeys(map(str, plain[:3]), -100)}),
    ):
        wanted, logprobs = generate(smollm2, prompt, **settings)
        told = complete(house, prompt, logprobs=0, **ours)
        raw = [float(row[token]) for row, token in zip(logprobs, wanted, strict=True)]
        assert told["logprobs"]["token_logprobs"] == pytest.approx(raw, abs=2e-4), settings
        assert told["text"] != text, settings
    short = complete(house, prompt, logit_bias={str(EOS): 100})
    assert (short["text"], short["finish_reason"]) == ("", "stop")
    longer = complete(house, prompt, logit_bias={str(EOS): 100}, min_tokens=4, logprobs=0)
    assert (len(longer["logprobs"]["tokens"]), longer["finish_reason"]) == (4, "stop")
    stopped = complete(house, prompt, stop_token_ids=[plain[3]], logprobs=0)
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["logprobs"]["tokens"]) == plain.index(plain[3])


def test_a_penalty_moves_away_from_what_was_said(house: House, prompt: Any) -> None:
    """Of the output alone: the first token stays, and with the largest penalty no token comes twice in a row."""
    plain = complete(house, prompt, logprobs=0, max_tokens=32)["logprobs"]["tokens"]
    moved = complete(house, prompt, logprobs=0, max_tokens=32, frequency_penalty=2, presence_penalty=2)["logprobs"][
        "tokens"
    ]
    assert moved[0] == plain[0]
    assert len(set(moved)) > len(set(plain))


def test_choices_share_the_prompt_and_draw_apart(house: House, smollm2: Path) -> None:
    """n answers: the same whatever else runs, the first as if it were alone, and the prompt is computed once."""
    (prompt,) = make_prompts(smollm2, (333,))
    ask: dict[str, Any] = {"model": "test-model", "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 1,
                           "seed": 7}  # fmt: skip
    before = house.worker("prefill")["computed_prompt_tokens"]["routine"]
    with httpx.Client(base_url=house.door.url, timeout=120, trust_env=False) as client:
        four = client.post("/v1/completions", json={**ask, "n": 4}).json()
        again = client.post("/v1/completions", json={**ask, "n": 4}).json()
        alone = client.post("/v1/completions", json=ask).json()
        events = client.post(
            "/v1/completions", json={**ask, "n": 4, "stream": True, "stream_options": {"include_usage": True}}
        ).text
    texts = [choice["text"] for choice in four["choices"]]
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts == [choice["text"] for choice in again["choices"]]
    assert texts[0] == alone["choices"][0]["text"]
    usage = four["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (333, 4 * NUM_TOKENS)
    chunks = [json.loads(line.removeprefix("data: ")) for line in events.split("\n\n") if line and "[DONE]" not in line]
    streamed = ["", "", "", ""]
    ends = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        streamed[choice["index"]] += choice["text"]
        ends += [choice["index"]] * (choice["finish_reason"] is not None)
    assert streamed == texts
    assert sorted(ends) == [0, 1, 2, 3]
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * NUM_TOKENS
    house.door.wait_idle()
    computed = house.worker("prefill")["computed_prompt_tokens"]["routine"] - before
    assert computed < 333 + 16 * 32, f"13 streams of one prompt computed {computed} of its tokens"
