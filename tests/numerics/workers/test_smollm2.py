"""Greedy tokens of SmolLM2-135M through engine and runner equal transformers `generate` in fp32, token for token.

The slice runs prompts of up to 129 tokens; `--full` all lengths up to 1,500. The oracle asserts its margins.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.oracle import LENGTHS, NEW_TOKENS, expect, make_prompts
from tests.support.replay import replay
from workers.engine.config import EngineConfig
from workers.runner.model_runner import ModelRunner, load_runner

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(1800)]

SLICE = (1, 2, 8, 17, 33, 64, 129)
NUM_BLOCKS = 1200
Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> ModelRunner:
    torch.set_num_threads(1)
    return load_runner(smollm2, "fp32", "fp32", 16, NUM_BLOCKS)


@pytest.fixture(scope="module")
def answers(smollm2: Path, is_full: bool) -> dict[Prompt, list[int]]:
    prompts = dict(zip(LENGTHS, make_prompts(smollm2), strict=True))
    lengths = LENGTHS if is_full else SLICE
    return {prompts[n]: list(expect(smollm2, prompts[n]).tokens) for n in lengths}


def run(runner: ModelRunner, prompts: Sequence[Prompt], chunk: int, stagger: int = 0) -> list[list[int]]:
    config = EngineConfig(
        block_tokens=16, num_blocks=NUM_BLOCKS, chunk_tokens=chunk, max_running=64, max_context_tokens=8192
    )
    return replay(runner, config, prompts, NEW_TOKENS, stagger).tokens


def test_alone_and_whole(runner: ModelRunner, answers: dict[Prompt, list[int]]) -> None:
    for prompt, tokens in answers.items():
        assert run(runner, [prompt], 2048) == [tokens]


def test_sixteen_at_once_with_staggered_arrivals(runner: ModelRunner, answers: dict[Prompt, list[int]]) -> None:
    prompts = (sorted(answers, key=len, reverse=True) * 3)[:16]
    assert run(runner, prompts, 64, stagger=2) == [answers[prompt] for prompt in prompts]


@pytest.mark.parametrize(("chunk", "longest"), [(1, 64), (7, 300), (64, 1500)])
def test_chunks(runner: ModelRunner, answers: dict[Prompt, list[int]], chunk: int, longest: int, is_full: bool) -> None:
    limit = longest if is_full else min(longest, 17 if chunk == 1 else 129)
    for prompt, tokens in answers.items():
        if len(prompt) <= limit:
            assert run(runner, [prompt], chunk) == [tokens]
