"""The prefix cache through real workers and HTTP: what is computed, shipped, skipped and told; answers are equal."""

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from tests.support.front_door import FrontDoor, Generated, wait_until
from tests.support.local_cluster import LocalCluster
from tests.support.tiny_models import save_tiny
from tests.support.tiny_tokenizer import write_model_folder
from workers.protocol import SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

S, BYTES_PER_TOKEN = 16, 3 * 2 * 2 * 16 * 4
PROMPT = [3 + (7 * i) % 250 for i in range(100)]
SETTINGS = {"block_tokens": S, "num_blocks": 64, "max_context_tokens": 500, "chunk_tokens": 32, "backend": "reference"}


class House:
    """Workers of a tiny model and a router in front of them."""

    def __init__(self, cluster: LocalCluster, door: FrontDoor) -> None:
        self.cluster, self.door = cluster, door

    def ask(self, prompt: Sequence[int]) -> Generated:
        (answer,) = self.door.generate([prompt], SamplingParams(max_tokens=20))
        self.door.wait_idle()
        return answer

    def post(self, **fields: Any) -> dict[str, Any]:
        body = {
            "model": "test-model",
            "prompt": PROMPT,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        request = urllib.request.Request(
            f"{self.door.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            answer: dict[str, Any] = json.load(reply)
        self.door.wait_idle()
        return answer

    def computed(self, pool: str) -> dict[str, int]:
        (found,) = [w for w in self.door.status()["workers"] if w["pool"] == pool]
        return dict(found["computed_prompt_tokens"])


@pytest.fixture
def make_house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    model = tmp_path / "model"
    save_tiny("llama", model, vocab_size=300)
    tokenizer = write_model_folder(tmp_path / "tokenizer")
    with ExitStack() as stack:

        def make(disaggregation: str = "always", **settings: Any) -> House:
            roles = ("prefill", "decode") if disaggregation == "always" else ("colocated",)
            folder = tmp_path / f"house-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            cluster = stack.enter_context(LocalCluster(folder, model, roles, **{**SETTINGS, **settings}))  # type: ignore[arg-type]
            config = RouterConfig(model_id="test-model", model_path=str(tokenizer), disaggregation=disaggregation)  # type: ignore[arg-type]
            door = stack.enter_context(FrontDoor(config, cluster.ring))
            door.set_workers(cluster.endpoints)
            door.wait_ready(len(roles))
            return House(cluster, door)

        yield make


def test_what_is_cached_is_neither_computed_nor_shipped(make_house: Callable[..., House]) -> None:
    plain, house = make_house(prefix_cache=False), make_house()
    first, again = house.ask(PROMPT), house.ask(PROMPT)
    assert first.tokens == again.tokens == plain.ask(PROMPT).tokens
    assert (first.stream.num_cached, again.stream.num_cached) == (0, 96)
    turn = [*PROMPT, *first.tokens, 5, 6, 7]
    second = house.ask(turn)
    assert second.tokens == plain.ask(turn).tokens
    assert second.stream.num_cached == 96, "prefill never saw the answer"
    assert house.computed("prefill")["routine"] == 100 + 4 + (123 - 96)
    assert set(house.computed("decode").values()) == {0}
    sent = [answer.stream.prefill_timings for answer in (first, again, second)]
    assert [t.sent_bytes // BYTES_PER_TOKEN for t in sent if t is not None] == [100, 100 - 96, 123 - 112]
    assert [t.prompt_tokens for t in sent if t is not None] == [100, 4, 27]


def test_prefill_ships_cached_pages_to_a_decode_worker_that_lost_them(make_house: Callable[..., House]) -> None:
    house = make_house(min_unit_bytes=1 << 10)
    first = house.ask(PROMPT)
    house.cluster.restart("decode")
    house.door.set_workers(house.cluster.endpoints)
    house.door.wait_ready(2)
    again = house.ask(PROMPT)
    assert again.tokens == first.tokens
    assert again.stream.num_cached == 96
    assert again.stream.prefill_timings is not None
    assert again.stream.prefill_timings.sent_bytes == 100 * BYTES_PER_TOKEN
    assert house.computed("prefill")["routine"] == 104


@pytest.mark.parametrize("disaggregation", ["always", "never"])
def test_usage_reports_what_nobody_computed_and_a_salt_keeps_apart(
    make_house: Callable[..., House], disaggregation: str
) -> None:
    house = make_house(disaggregation)
    cached = [
        house.post(**fields)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for fields in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a", "priority": 5}, {"cache_salt": "b"})
    ]
    assert cached == [0, 96, 0, 96, 0]
    assert len({house.post(**fields)["choices"][0]["text"] for fields in ({}, {"cache_salt": "c"})}) == 1


def test_an_ingress_learns_what_each_worker_has(make_house: Callable[..., House]) -> None:
    house = make_house()
    house.ask(PROMPT)
    links = [link for link, _ in house.door.router._links.values()]
    wait_until(lambda: sorted(len(link.snapshot().cached) for link in links) == [6, 7], "both have told their blocks")
    again = house.ask(PROMPT)
    names = again.stream.names(S)
    assert all(set(names) <= link.snapshot().cached for link in links)
