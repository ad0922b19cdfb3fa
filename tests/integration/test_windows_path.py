"""Models with sliding windows through real workers and a real transfer: prefill has let go of what slid out when units
leave, decode has no block for it, and tokens are those of transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from router.config import RouterConfig
from tests.support.families import OURS
from tests.support.front_door import FrontDoor
from tests.support.local_cluster import LocalCluster
from tests.support.oracle import expect
from tests.support.tiny_models import save_tiny
from tests.support.tiny_tokenizer import write_model_folder
from workers.protocol import SamplingParams

pytestmark = [pytest.mark.integration, pytest.mark.numerics, pytest.mark.timeout(240)]

NEW_TOKENS, S = 20, 16
LENGTHS = (300, 40, 257, 64)
NUM_BLOCKS = {"mistral": 24, "gemma3": 60, "gpt-oss": 60}
"""Four contexts side by side, and not one if every layer kept all of it beside the others."""


@pytest.fixture(scope="module", params=sorted(NUM_BLOCKS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    torch.set_num_threads(1)
    family = OURS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(family.kind, folder, jitter=0.2, eos_token_id=None, **family.changes)
    return request.param, folder


@pytest.fixture(params=[("gloo", 1 << 10), ("gloo", 2 << 20), ("shm", 1 << 10)], ids=lambda p: f"{p[0]}-{p[1]}")
def door(request: pytest.FixtureRequest, model: tuple[str, Path], tmp_path: Path) -> Iterator[FrontDoor]:
    """One prefill and one decode worker; whole prompts join to one unit, or each chunk is cut by layers."""
    transport, min_unit_bytes = request.param
    tokenizer = write_model_folder(tmp_path / "tokenizer")
    settings = {
        "block_tokens": S, "num_blocks": NUM_BLOCKS[model[0]], "max_context_tokens": 330, "chunk_tokens": 24,
        "min_unit_bytes": min_unit_bytes, "backend": "reference", "transport": transport,
    }  # fmt: skip
    config = RouterConfig(model_id="test-model", model_path=str(tokenizer), disaggregation="always")
    with (
        LocalCluster(tmp_path, model[1], ("prefill", "decode"), **settings) as cluster,
        FrontDoor(config, cluster.ring) as door,
    ):
        door.set_workers(cluster.endpoints)
        door.wait_ready(2)
        yield door


def test_tokens_equal_transformers(door: FrontDoor, model: tuple[str, Path]) -> None:
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    expected = [expect(model[1], prompt, NEW_TOKENS).tokens for prompt in prompts]
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    alone = [door.generate([prompt], greedy)[0] for prompt in prompts]
    assert [answer.tokens for answer in alone] == expected
    together = door.generate(prompts, greedy)
    assert [answer.tokens for answer in together] == expected
    door.wait_idle()
    # A conversation: the prefix cache of both workers has the tail of its windows.
    turn = (*prompts[1], *expected[1], *prompts[3][:30])
    (answer,) = door.generate([turn], greedy)
    assert answer.tokens == expect(model[1], turn, NEW_TOKENS).tokens
    door.wait_idle()
    for worker in door.status()["workers"]:
        assert worker["blocks_in_use"] == 0
        if worker["pool"] == "decode":
            assert set(worker["computed_prompt_tokens"].values()) == {0}
