"""Steps from plain numbers are those from tensors, to the last bit."""

from pathlib import Path

import pytest
import torch

from tests.support.native_runs import load_native
from tests.support.tiny_models import save_tiny
from workers.engine.plan import Chunk, StepPlan
from workers.ops.native import NativeStep
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.runner.plain import PlainSteps

pytestmark = pytest.mark.numerics


def chunk(name: int, tokens: tuple[int, ...], first: int, is_sampled: bool) -> Chunk:
    sampling = SamplingParams() if is_sampled else None
    return Chunk(StreamKey(bytes([name]) * 16, 0), tokens, first, ((name, name + 4),), sampling, 0, False, True)


def test_equal_logits_cache_and_layers(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    decoder = load_native(tmp_path, "q4", 2)
    assert isinstance(decoder.step, NativeStep)
    layout = plan_layout(decoder.spec, decoder.state("bf16"), 4, "bf16", "dim_major")
    tensors, plain = PagedKVCache(layout, 8), PagedKVCache(layout, 8)
    steps = PlainSteps(decoder.step, plain)
    for chunks in (
        (chunk(0, (5, 6, 7), 0, False), chunk(1, (8, 9, 10, 11, 12), 0, True), chunk(2, (3,), 0, True)),
        (chunk(0, (8, 9), 3, True), chunk(1, (1,), 5, True), chunk(2, (4, 4), 1, False)),
        (chunk(2, (9,), 3, True),),
        (chunk(2, (9,), 4, False),),
    ):
        plan, seen = StepPlan(chunks), list[int]()
        batch = make_batch(plan, tensors, seen.append)
        expected = decoder.forward(batch.ids_T, batch.positions_T, batch.rows_R, batch.facts)
        found = steps.run(plan, batch.sampled_chunks, seen.append)
        assert torch.equal(found, expected)
        assert torch.equal(plain.data, tensors.data)
        assert seen == 2 * list(range(decoder.spec.num_layers))
