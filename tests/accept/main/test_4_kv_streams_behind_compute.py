"""Line 4: the KV cache of a prompt of 1,500 tokens travels while the prompt is still being computed, by both sides'
clocks.

Both processes read the same monotonic clock of one machine, so their microseconds can be compared.
"""

import json
from typing import Any

import pytest

from tests.accept.main.conftest import MakeHouse
from tests.support.house import House
from tests.support.oracle import make_prompts
from workers.protocol import SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def explain(house: House, prompt: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    (answer,) = house.door.generate([prompt], SamplingParams(max_tokens=3), explain=True)
    assert answer.stream.explain is not None
    return {fact.role: json.loads(fact.facts) for fact in answer.stream.explain.facts}


def test_kv_arrives_chunk_by_chunk(make_house: MakeHouse, smollm2: Any) -> None:
    house = make_house(chunk_tokens=64, dtype="fp32", kv_dtype="fp32")
    (prompt,) = make_prompts(smollm2, (1500,))
    facts = explain(house, prompt)
    chunk_ends = [end for _, _, _, _, end in facts["prefill"]["chunks"]]
    last_layer_written = facts["prefill"]["chunks"][-1][3]
    arrivals = facts["decode"]["arrivals"]
    assert len(chunk_ends) == 24
    total = sum(num_bytes for num_bytes, _ in arrivals)
    assert total == 1500 * 46_080
    assert min(at for _, at in arrivals) < chunk_ends[1], "the first KV byte arrives after the second chunk ended"
    behind = sum(num_bytes for num_bytes, at in arrivals if at <= last_layer_written)
    assert behind / total >= 0.9, f"only {behind / total:.1%} of the bytes arrived before the last layer ended"
