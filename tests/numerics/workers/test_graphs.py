"""Recorded decode steps answer as the steps that they record, on tiny models of every kind; recorded by tracing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.oracle import expect
from tests.support.recording import TraceCapture
from tests.support.replay import replay
from tests.support.tiny_models import save_tiny
from workers.engine.config import EngineConfig
from workers.model.build import WeightMode, load_decoder
from workers.ops.cuda import CudaOps
from workers.runner.graphs import DecodeGraphs
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.runner.model_runner import ModelRunner

LENGTHS = (1, 15, 16, 33, 60)
NEW_TOKENS = 9
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma3": ("gemma3_text", {}),
    "mixtral": ("mixtral", {}),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED, "sliding_window": 16},
    ),
}


def run(folder: Path, prompts: list[tuple[int, ...]], capture: TraceCapture | None, mode: WeightMode = "fp32"):
    ops = CudaOps("cpu")
    decoder = load_decoder(folder, mode, ops)
    layout = plan_layout(decoder.spec, decoder.state("fp32"), 8, "fp32")
    cache = PagedKVCache(layout, 60 * len(layout.layer_groups), has_scratch=True)
    cache.data[:, cache.scratch_block] = torch.nan
    graphs = DecodeGraphs(decoder, ops, cache, 16, 128, capture) if capture else None
    config = EngineConfig(
        block_tokens=8, num_blocks=cache.num_blocks, chunk_tokens=24, max_running=16, max_context_tokens=128,
        windows=tuple(group.window for group in layout.layer_groups),
    )  # fmt: skip
    tokens = replay(ModelRunner(decoder, cache, whole=graphs), config, prompts, NEW_TOKENS, 3).tokens
    return tokens, cache


@pytest.mark.parametrize("name", sorted(KINDS))
def test_recorded_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    kind, changes = KINDS[name]
    save_tiny(kind, tmp_path, jitter=0.2, eos_token_id=None, **changes)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    capture = TraceCapture()
    tokens, cache = run(tmp_path, prompts, capture)
    assert tokens == [list(expect(tmp_path, prompt, NEW_TOKENS).tokens) for prompt in prompts]
    assert capture.num_replayed > capture.num_recorded > 2, "steps were recorded and replayed"
    assert cache.data[:, cache.scratch_block, :, :, 0].isfinite().all(), "padding went to the scratch block"


def test_bfloat16_tokens_equal_those_op_by_op(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny("mixtral", tmp_path, jitter=0.2, eos_token_id=None)
    prompts = [tuple(range(3, 3 + n)) for n in LENGTHS]
    assert run(tmp_path, prompts, TraceCapture(), "bf16")[0] == run(tmp_path, prompts, None, "bf16")[0]
