"""A model cut among ranks answers as the whole one: greedy tokens equal transformers in fp32, grids are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.oracle import expect, make_prompts
from tests.support.rank_threads import RankThreads
from tests.support.replay import replay
from tests.support.tiny_models import save_tiny
from workers.engine.config import EngineConfig
from workers.errors import BackendUnavailable, ModelRefused
from workers.model.build import load_decoder
from workers.model.decoder import Decoder
from workers.ops.cuda import CudaOps
from workers.ops.native import NativeOps
from workers.ops.reference import ReferenceOps

LENGTHS = (1, 3, 8, 17, 31, 60)
NEW_TOKENS = 10
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"final_logit_softcapping": 30.0}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": (
        "qwen3_moe",
        {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
    ),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED, "sliding_window": 16},
    ),
}
SEEDS = {"qwen3-moe": 1, "llama-tied": 1}
"""Where seed 0 gives an oracle that tosses coins."""


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.set_num_threads(1)
    kind, changes = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(kind, folder, SEEDS.get(request.param, 0), jitter=0.2, eos_token_id=None, **changes)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    return folder, prompts, [list(expect(folder, prompt, NEW_TOKENS).tokens) for prompt in prompts]


def generate(ranks: RankThreads, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    cache = ranks.caches[0]
    config = EngineConfig(
        block_tokens=4, num_blocks=cache.num_blocks, chunk_tokens=24, max_running=16, max_context_tokens=128,
        windows=tuple(group.window for group in cache.layout.layer_groups),
    )  # fmt: skip
    try:
        return replay(ranks, config, prompts, NEW_TOKENS, 2).tokens
    finally:
        ranks.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_tokens_equal_transformers(case, num_ranks: int) -> None:
    folder, prompts, answers = case
    ranks = RankThreads(folder, "fp32", ReferenceOps, num_ranks, 4, 120)
    assert generate(ranks, prompts) == answers
    assert ranks.meeting.num_sums > 0
    held = sum(decoder.weights.num_bytes for decoder in ranks.decoders)
    whole = load_decoder(folder, "fp32", ReferenceOps()).weights.num_bytes
    assert whole <= held < 1.5 * whole, "what ranks hold twice is KV heads and routers"


@pytest.mark.parametrize("backend", ["native", "cuda-on-cpu"])
def test_other_backends_in_a_group(case, backend: str) -> None:
    folder, prompts, answers = case
    try:
        make_ops = (lambda: NativeOps(1)) if backend == "native" else (lambda: CudaOps("cpu"))
        ranks = RankThreads(folder, "fp32", make_ops, 2, 4, 120)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert generate(ranks, prompts) == answers


@pytest.mark.numerics
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_smollm2(smollm2: Path, num_ranks: int) -> None:
    """Nine heads over three KV heads: no part is even."""
    torch.set_num_threads(1)
    prompts = make_prompts(smollm2, (9, 40))
    answers = [list(expect(smollm2, prompt, NEW_TOKENS).tokens) for prompt in prompts]
    assert generate(RankThreads(smollm2, "fp32", ReferenceOps, num_ranks, 4, 120), prompts) == answers


def grid_values(decoder: Decoder) -> list[torch.Tensor]:
    """Of one layer: q and out, gate and up, down; dense, as the reference holds them."""
    layer = decoder.weights.layers[0]
    return [
        matrix.data_NK for matrix in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down, decoder.weights.head)
    ]


@pytest.mark.parametrize("mode", ["bf16", "int8", "q4"])
def test_ranks_hold_the_grid_values_of_the_whole(tmp_path: Path, mode) -> None:
    heads, dim, size, vocab = 4, 32, 192, 211
    save_tiny(
        "llama", tmp_path, jitter=0.1, num_attention_heads=heads, num_key_value_heads=2, head_dim=dim,
        intermediate_size=size,
    )  # fmt: skip
    whole = grid_values(load_decoder(tmp_path, mode, ReferenceOps()))
    ranks = RankThreads(tmp_path, mode, ReferenceOps, 2, 4, 8)
    ranks.close()
    first, second = (grid_values(decoder) for decoder in ranks.decoders)
    q, kv = heads * dim // 2, dim
    assert torch.equal(whole[0][:q], first[0][:q])
    assert torch.equal(whole[0][q : 2 * q], second[0][:q])
    assert torch.equal(whole[0][2 * q + kv : 2 * q + 2 * kv], second[0][q : q + kv]), "the second KV head's K"
    assert torch.equal(whole[1], torch.cat((first[1], second[1]), dim=1))
    gate, up = whole[2].chunk(2)
    assert torch.equal(gate, torch.cat((first[2].chunk(2)[0], second[2].chunk(2)[0])))
    assert torch.equal(up, torch.cat((first[2].chunk(2)[1], second[2].chunk(2)[1])))
    assert torch.equal(whole[3], torch.cat((first[3], second[3]), dim=1))
    assert torch.equal(whole[4], torch.cat((first[4], second[4])))
    assert len(first[4]) == vocab // 2


def test_a_grid_that_ranks_would_cut_is_refused(tmp_path: Path) -> None:
    """Heads of 16 put a boundary of ranks inside a group of 32."""
    save_tiny("llama", tmp_path)
    with pytest.raises(ModelRefused, match="share scales in groups of 32"):
        RankThreads(tmp_path, "q4", ReferenceOps, 2, 4, 8)


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(ModelRefused, match="7 ranks cannot share 6 heads"):
        RankThreads(tmp_path, "fp32", ReferenceOps, 7, 4, 8)
