"""Our decoder on tiny random models of every family that it knows: greedy tokens equal transformers `generate` in fp32,
whatever the chunks, the batch and the pool, and logits equal those of the transformers classes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.decoder_runs import compute_logits, generate, load
from tests.support.oracle import expect, load_oracle
from tests.support.tiny_models import save_tiny
from workers.errors import BackendUnavailable
from workers.model.fallback import load_fallback
from workers.ops.select import select_ops
from workers.runner.probe import prove_model

LENGTHS = (1, 2, 3, 5, 7, 8, 11, 16, 17, 23, 31, 40, 47, 61, 77, 90)
NEW_TOKENS = 16
MAX_LOGIT_ERROR = 1e-4
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gemma3": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "final_logit_softcapping": 30.0,
        },
    ),
    "mixtral": ("mixtral", {"sliding_window": 24}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED, "sliding_window": 16,
            "rope_parameters": YARN,
        },
    ),
}  # fmt: skip
SEEDS = {"llama3": 1, "qwen3-moe": 1}
"""Where seed 0 gives an oracle that tosses coins."""


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(name, folder, our decoder, prompts, what transformers answers); the oracle asserts its margins."""
    torch.set_num_threads(1)
    kind, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(kind, folder, SEEDS.get(request.param, 0), jitter=0.2, eos_token_id=None, **changes)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    answers = [list(expect(folder, prompt, NEW_TOKENS).tokens) for prompt in prompts]
    return request.param, folder, load(folder), prompts, answers


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_alone_in_chunks(case, chunk: int) -> None:
    _, _, decoder, prompts, answers = case
    for prompt, answer in zip(prompts[3::4], answers[3::4], strict=True):
        assert generate(decoder, [prompt], NEW_TOKENS, chunk).tokens == [answer]


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
def test_sixteen_with_staggered_arrivals(case, block_tokens: int) -> None:
    _, _, decoder, prompts, answers = case
    replayed = generate(decoder, prompts, NEW_TOKENS, 24, 2, block_tokens, 1200 // block_tokens)
    assert replayed.tokens == answers


def test_native_kernels_answer_the_same(case) -> None:
    _, folder, _, prompts, answers = case
    try:
        ops = select_ops("native", 1).ops
    except BackendUnavailable as error:
        pytest.skip(str(error))
    decoder = load(folder, "fp32", ops)
    assert generate(decoder, prompts, NEW_TOKENS, 24, 2, 32).tokens == answers
    assert generate(decoder, prompts[-1:], NEW_TOKENS, 7, 0, 32).tokens == answers[-1:]


def test_a_small_pool_preempts_and_recomputes(case) -> None:
    _, _, decoder, prompts, answers = case
    replayed = generate(decoder, prompts, NEW_TOKENS, 32, 1, 4, 40)
    assert replayed.num_preempted > 0
    assert replayed.tokens == answers


def test_logits_equal_those_of_transformers(case) -> None:
    name, folder, decoder, prompts, _ = case
    text = prompts[-1]
    with torch.inference_mode():
        expected_TV = load_oracle(folder)(torch.tensor([text])).logits[0]
    for chunk in (1 << 30, 7):
        assert (compute_logits(decoder, text, chunk) - expected_TV).abs().max() <= MAX_LOGIT_ERROR
    if name != "gpt-oss":  # sinks, which the fallback refuses
        fallback = load_fallback(folder, torch.float32)
        error = (compute_logits(decoder, text) - compute_logits(fallback, text)).abs().max()
        assert error <= MAX_LOGIT_ERROR


def test_the_runner_accepts_it(case) -> None:
    for mode in ("fp32", "bf16", "int8", "q4"):
        prove_model(load(case[1], mode))


@pytest.mark.parametrize("name", sorted(CASES))
def test_fewer_bits_err_more(name: str, tmp_path: Path) -> None:
    """Each grid is near the exact model, and none is the exact model. Small weights: a random model is chaotic."""
    kind, changes = CASES[name]
    save_tiny(kind, tmp_path, jitter=0.02, **(changes | {"initializer_range": 0.06}))
    text = range(3, 93)
    exact_TV = compute_logits(load(tmp_path), text)
    found = [compute_logits(load(tmp_path, mode), text) for mode in ("bf16", "int8", "q4")]
    errors = [float((each_TV - exact_TV).std() / exact_TV.std()) for each_TV in found]
    assert errors == sorted(errors)
    assert 0 < errors[0] < 0.1
    assert errors[1] < 0.2
    assert errors[2] < 0.5
