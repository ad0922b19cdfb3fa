"""Greedy tokens of tiny random models equal transformers `generate` in fp32, whatever the chunks, the batch and the
pool.
"""

import pytest
import torch

from tests.support.oracle import expect
from tests.support.replay import Replayed, replay
from tests.support.tiny_models import KINDS, save_tiny
from workers.engine.config import EngineConfig
from workers.runner.model_runner import load_runner

LENGTHS = (1, 2, 7, 16, 17, 40, 61, 90)
NEW_TOKENS = 16


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(folder, prompts, what transformers answers); the oracle asserts its margins."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder, eos_token_id=None)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    return folder, prompts, [list(expect(folder, prompt, NEW_TOKENS).tokens) for prompt in prompts]


def run(
    model, chunk: int, block_tokens: int = 4, num_blocks: int = 160, stagger: int = 0, kv: str = "fp32"
) -> Replayed:
    folder, prompts, _ = model
    config = EngineConfig(
        block_tokens=block_tokens, num_blocks=num_blocks, chunk_tokens=chunk, max_running=16,
        max_context_tokens=min(128, block_tokens * num_blocks),
    )  # fmt: skip
    return replay(load_runner(folder, "fp32", kv, block_tokens, num_blocks), config, prompts, NEW_TOKENS, stagger)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks(model, chunk: int) -> None:
    assert run(model, chunk).tokens == model[2]


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
def test_block_sizes_with_staggered_arrivals(model, block_tokens: int) -> None:
    assert run(model, 24, block_tokens, 640 // block_tokens, stagger=3).tokens == model[2]


def test_a_small_pool_preempts_and_recomputes(model) -> None:
    replayed = run(model, 32, block_tokens=4, num_blocks=30, stagger=1)
    assert replayed.num_preempted > 0
    assert replayed.tokens == model[2]


def test_rounded_kv_is_noticed(model) -> None:
    """The comparison can fail: bf16 KV changes some token of some model."""
    if model[0].name.startswith("llama"):
        assert run(model, 64, kv="bf16").tokens != model[2]
