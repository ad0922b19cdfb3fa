"""The native backend on SmolLM2-135M: exact in fp32, and near it in the modes of fewer bits.

The fixed text of the quality check is the head of the licence; bounds are those of docs/models.md for KL and top-1
agreement, and 2 % of perplexity.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.numerics.workers.test_decoder_smollm2 import SLICE, read_bounds
from tests.support.decoder_runs import compute_logits, generate
from tests.support.native_runs import load_native, logits_in_pieces
from tests.support.oracle import LENGTHS, NEW_TOKENS, ROOT, expect, load_tokenizer, make_prompts
from workers.model.decoder import Decoder
from workers.model.fallback import load_fallback

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(1800)]

TEXT_TOKENS = 768


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Decoder:
    torch.set_num_threads(1)
    return load_native(smollm2, "fp32", 1)


@pytest.fixture(scope="module")
def text(smollm2: Path) -> list[int]:
    ids = load_tokenizer(smollm2)((ROOT / "LICENSE").read_text())["input_ids"]
    return list(ids[:TEXT_TOKENS])


def test_greedy_tokens_equal_transformers_generate(exact: Decoder, smollm2: Path, is_full: bool) -> None:
    prompts = dict(zip(LENGTHS, make_prompts(smollm2), strict=True))
    chosen = [prompts[n] for n in (LENGTHS if is_full else SLICE)]
    expected = [list(expect(smollm2, prompt).tokens) for prompt in chosen]
    for chunk, stagger in ((2048, 0), (64, 2)):
        assert generate(exact, chosen[:16], NEW_TOKENS, chunk, stagger, num_blocks=1200).tokens == expected[:16]


def test_logits_equal_those_of_transformers(exact: Decoder, smollm2: Path) -> None:
    prompt = make_prompts(smollm2, (300,), seed=6)[0]
    error = compute_logits(exact, prompt) - compute_logits(load_fallback(smollm2, torch.float32), prompt)
    assert error.abs().max() <= 1e-4


def mean_nll(logits_TV: Tensor, text: list[int]) -> float:
    return float(-logits_TV[:-1].log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None]).mean())


@pytest.mark.parametrize("mode", ["bf16", "int8", "q4"])
def test_quality_on_a_fixed_text(exact: Decoder, smollm2: Path, text: list[int], mode) -> None:
    """With the bf16 KV cache that serves them."""
    most_kl, least_agreement = read_bounds()[mode]
    exact_TV = logits_in_pieces(exact, "fp32", text, [len(text)])
    found_TV = logits_in_pieces(load_native(smollm2, mode, 1), "bf16", text, [256, 512])
    log_p_TV, log_q_TV = exact_TV.log_softmax(-1), found_TV.log_softmax(-1)
    kl = float((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1).mean())
    agreement = float((exact_TV.argmax(-1) == found_TV.argmax(-1)).float().mean())
    perplexity = torch.tensor(mean_nll(found_TV, text) - mean_nll(exact_TV, text)).exp()
    print(f"{mode}: KL {kl:.5f}, agreement {agreement:.4f}, perplexity x {perplexity:.4f}")
    assert 0 < kl <= most_kl
    assert agreement >= least_agreement
    assert 0.98 <= perplexity <= 1.02
