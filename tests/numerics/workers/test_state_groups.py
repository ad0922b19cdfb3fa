"""Layers with windows let go of what slid out: contexts many times the window, in pools that could not hold them
otherwise, and greedy tokens are those of transformers in fp32."""

from pathlib import Path

import pytest
import torch

from tests.support.decoder_runs import load
from tests.support.families import OURS
from tests.support.oracle import expect
from tests.support.replay import replay
from tests.support.tiny_models import save_tiny
from workers.engine.config import EngineConfig
from workers.errors import BackendUnavailable
from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps
from workers.ops.select import select_ops
from workers.pages import blocks_to_hold, count_pages
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.runner.model_runner import ModelRunner

NAMES = ["mistral", "gemma3", "gpt-oss", "qwen2-windows"]
LENGTHS, NEW_TOKENS, CHUNK, BLOCK_TOKENS = (300, 33, 171), 24, 20, 16
CONTEXT = LENGTHS[0] + NEW_TOKENS


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(name, folder, prompts, what transformers answers)."""
    torch.set_num_threads(1)
    family = OURS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(family.kind, folder, family.seed, jitter=0.2, eos_token_id=None, **family.changes)
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    return request.param, folder, prompts, [list(expect(folder, p, NEW_TOKENS).tokens) for p in prompts]


def make_ops(backend: str) -> Ops:
    if backend == "reference":
        return ReferenceOps()
    try:
        return select_ops("native", 1).ops
    except BackendUnavailable as error:
        pytest.skip(str(error))


class Watched(ModelRunner):
    """Notes the most blocks that the tables of one step name."""

    most = 0

    def execute(self, plan, on_layer):
        named = {block for chunk in plan.chunks for table in chunk.tables for block in table if block >= 0}
        self.most = max(self.most, len(named))
        return super().execute(plan, on_layer)


def make_runner(folder: Path, backend: str, spare: int) -> tuple[Watched, EngineConfig, int]:
    """Over a pool that just holds the longest context, and `spare` blocks; and what would hold it without windows."""
    decoder = load(folder, "fp32", make_ops(backend))
    keys = "dim_major" if backend == "native" else "token_major"
    layout = plan_layout(decoder.spec, decoder.state("fp32"), BLOCK_TOKENS, "fp32", keys)
    windows = tuple(group.window for group in layout.layer_groups)
    pages = count_pages(CONTEXT, BLOCK_TOKENS)
    num_blocks = blocks_to_hold(pages, windows, BLOCK_TOKENS, CHUNK) + spare
    config = EngineConfig(
        block_tokens=BLOCK_TOKENS, num_blocks=num_blocks, chunk_tokens=CHUNK, max_running=8, max_context_tokens=CONTEXT,
        windows=windows,
    )  # fmt: skip
    return Watched(decoder, PagedKVCache(layout, num_blocks)), config, pages * len(windows)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_pool_that_holds_no_context_without_windows(case, backend: str) -> None:
    name, folder, prompts, answers = case
    runner, config, without = make_runner(folder, backend, spare=0)
    assert config.num_blocks < without
    if name == "mistral":
        assert config.num_blocks * BLOCK_TOKENS < CONTEXT / 4
    assert replay(runner, config, prompts[:1], NEW_TOKENS).tokens == answers[:1]


def test_a_larger_pool_is_not_used(case) -> None:
    _, folder, prompts, _ = case
    runner, config, _ = make_runner(folder, "reference", spare=100)
    replay(runner, config, prompts[:1], NEW_TOKENS)
    assert runner.most <= config.num_blocks - 100


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_several_side_by_side(case, backend: str) -> None:
    """With room for little more than one: they wait for each other or are preempted."""
    _, folder, prompts, answers = case
    runner, config, _ = make_runner(folder, backend, spare=8)
    assert replay(runner, config, prompts, NEW_TOKENS, stagger_steps=3).tokens == answers
