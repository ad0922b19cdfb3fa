"""Line 3: decode computes no prompt token as routine, and every block comes back, whenever a client hangs up."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.accept.main.conftest import MakeHouse
from tests.support.front_door import wait_until
from tests.support.house import House
from tests.support.oracle import expect, make_prompts
from tests.support.raw_client import RawStream
from workers.protocol import SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


def open_stream(house: House, prompt: tuple[int, ...], max_tokens: int = 400) -> RawStream:
    body = {"model": "test-model", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    return RawStream(house.door.port, "/v1/completions", body)


def check_clean(house: House, smollm2: Path) -> None:
    """Everything is back at zero, and an ordinary request is answered as if nothing had happened."""
    house.door.wait_idle()
    (prompt,) = make_prompts(smollm2, (33,))
    wanted = expect(smollm2, prompt, 8)
    (answer,) = house.door.generate([prompt], SamplingParams(max_tokens=8))
    assert answer.tokens == wanted.tokens
    house.door.wait_idle()
    computed = house.worker("decode")["computed_prompt_tokens"]
    assert computed == dict.fromkeys(computed, 0)


def test_hanging_up_while_queued(make_house: MakeHouse, smollm2: Path) -> None:
    house = make_house(max_running=1)
    (prompt,) = make_prompts(smollm2, (17,))
    first = open_stream(house, prompt)
    next(first.events())
    second = open_stream(house, prompt)
    wait_until(lambda: house.door.status()["queued"] == 1, "the second request waits in the queue")
    second.hang_up()
    wait_until(lambda: house.door.status()["queued"] == 0, "the queue forgets it")
    assert house.door.status()["open_streams"] == 1
    first.hang_up()
    check_clean(house, smollm2)


@pytest.mark.parametrize("tokens_left", [1400, 500], ids=["in prefill", "in transfer"])
def test_hanging_up_while_prefill_computes(make_house: MakeHouse, smollm2: Path, tokens_left: int) -> None:
    """With chunks of 64 units are on their way from the second chunk on: at 500 tokens left most KV has been
    shipped."""
    house = make_house(chunk_tokens=64)
    (prompt,) = make_prompts(smollm2, (1500,))
    stream = open_stream(house, prompt)
    wait_until(
        lambda: 0 < house.worker("prefill")["queued_tokens"] <= tokens_left,
        f"{tokens_left} tokens are left to compute",
        30,
    )
    stream.hang_up()
    started = time.monotonic()
    house.door.wait_idle()
    assert time.monotonic() - started < 2.0, "the work went on for longer than two steps"
    assert house.worker("prefill")["computed_prompt_tokens"]["routine"] < 1500
    check_clean(house, smollm2)


def test_hanging_up_while_decoding(make_house: MakeHouse, smollm2: Path) -> None:
    house = make_house()
    (prompt,) = make_prompts(smollm2, (65,))
    stream = open_stream(house, prompt)
    for _, _ in zip(range(5), stream.events(), strict=False):
        continue
    stream.hang_up()
    check_clean(house, smollm2)


def test_hanging_up_at_random(make_house: MakeHouse, smollm2: Path, is_full: bool) -> None:
    """200 random hang-ups (24 in the slice), eight at a time, at any stage."""
    seed = 20261130
    house, rng = make_house(chunk_tokens=64), random.Random(seed)
    plans = [(rng.choice((2, 17, 64, 200, 333)), rng.uniform(0, 1.2)) for _ in range(200 if is_full else 24)]
    prompts = {len(prompt): prompt for prompt in make_prompts(smollm2)}
    faults: list[Any] = []

    def drop_some(mine: list[tuple[int, float]]) -> None:
        try:
            for length, delay_s in mine:
                stream = open_stream(house, prompts[length])
                threading.Event().wait(delay_s)
                stream.hang_up()
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=drop_some, args=(plans[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [], f"seed {seed}"
    check_clean(house, smollm2)
