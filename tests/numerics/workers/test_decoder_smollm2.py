"""Our decoder on SmolLM2-135M: exact in fp32, and in each mode of fewer bits within the bounds of docs/models.md.

The slice runs prompts of up to 129 tokens; `--full` all lengths up to 1,500. The oracle asserts its margins.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.decoder_runs import compute_logits, generate, load
from tests.support.oracle import LENGTHS, NEW_TOKENS, ROOT, expect, load_oracle, make_prompts
from workers.model.arch import read_config
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import Decoder
from workers.model.fallback import load_fallback
from workers.model.gguf_grids import open_grids
from workers.ops.reference import dequantize

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(1800)]

SLICE = (1, 2, 8, 17, 33, 64, 129)
MODES = ("bf16", "int8", "q4")
Prompt = tuple[int, ...]


def read_bounds() -> dict[str, list[float]]:
    """mode -> (max mean KL, min top-1 agreement) of the table in docs/models.md."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", (ROOT / "docs/models.md").read_text(), re.M)
    return {mode: [float(number) for number in numbers] for mode, *numbers in rows}


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    torch.set_num_threads(1)
    return load(smollm2)


@pytest.fixture(scope="module")
def answers(smollm2: Path, is_full: bool) -> dict[Prompt, list[int]]:
    prompts = dict(zip(LENGTHS, make_prompts(smollm2), strict=True))
    return {prompts[n]: list(expect(smollm2, prompts[n]).tokens) for n in (LENGTHS if is_full else SLICE)}


def run(decoder: Decoder, prompts: list[Prompt], chunk: int, stagger: int = 0) -> list[list[int]]:
    return generate(decoder, prompts, NEW_TOKENS, chunk, stagger, num_blocks=1200).tokens


def test_alone_and_whole(decoder: Decoder, answers: dict[Prompt, list[int]]) -> None:
    for prompt, tokens in answers.items():
        assert run(decoder, [prompt], 2048) == [tokens]


def test_sixteen_at_once_with_staggered_arrivals(decoder: Decoder, answers: dict[Prompt, list[int]]) -> None:
    prompts = (sorted(answers, key=len, reverse=True) * 3)[:16]
    assert run(decoder, prompts, 64, stagger=2) == [answers[prompt] for prompt in prompts]


@pytest.mark.parametrize(("chunk", "longest"), [(1, 64), (7, 300), (64, 1500)])
def test_chunks(decoder: Decoder, answers: dict[Prompt, list[int]], chunk: int, longest: int, is_full: bool) -> None:
    limit = longest if is_full else min(longest, 17 if chunk == 1 else 129)
    for prompt, tokens in answers.items():
        if len(prompt) <= limit:
            assert run(decoder, [prompt], chunk) == [tokens]


def test_logits_equal_those_of_the_fallback(decoder: Decoder, smollm2: Path) -> None:
    text = make_prompts(smollm2, (300,), seed=6)[0]
    error = (compute_logits(decoder, text) - compute_logits(load_fallback(smollm2, torch.float32), text)).abs().max()
    assert error <= 1e-4


@pytest.fixture(scope="module")
def truths(smollm2: Path, answers: dict[Prompt, list[int]]) -> list[tuple[Prompt, int, Tensor]]:
    """(prompt and answer, length of the prompt, the oracle's logits after each token)."""
    model, found = load_oracle(smollm2), []
    for prompt, answer in answers.items():
        text = prompt + tuple(answer[:-1])
        with torch.inference_mode():
            found.append((text, len(prompt), model(torch.tensor([text])).logits[0]))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_teacher_forced_on_the_oracles_text(smollm2: Path, truths, mode) -> None:
    """Each token that the mode would choose is among the oracle's top 5; KL and agreement are within bounds."""
    most_kl, least_agreement = read_bounds()[mode]
    decoder = load(smollm2, mode)
    kls, agreements = [], []
    for text, num_prompt, exact_TV in truths:
        found_TV = compute_logits(decoder, text)
        chosen_T = found_TV.argmax(-1)
        in_top5_T = (exact_TV.topk(5).indices == chosen_T[:, None]).any(-1)
        assert bool(in_top5_T[num_prompt - 1 :].all())
        log_p_TV, log_q_TV = exact_TV.log_softmax(-1), found_TV.log_softmax(-1)
        kls.append((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1))
        agreements.append(chosen_T == exact_TV.argmax(-1))
    kl, agreement = float(torch.cat(kls).mean()), float(torch.cat(agreements).float().mean())
    assert 0 < kl <= most_kl
    assert agreement >= least_agreement


def test_the_grids_of_the_file_are_taken_as_they_are(smollm2: Path) -> None:
    """Dequantized they are bit for bit the converted weights, for the plain, the un-permuted and the 8-bit ones."""
    grids = open_grids(smollm2, read_config(smollm2))
    assert grids is not None
    checkpoint = Checkpoint(smollm2)
    attention = "model.layers.7.self_attn"
    qkv = [(f"{attention}.{name}_proj.weight", rows) for name, rows in (("q", 576), ("k", 192), ("v", 192))]
    for parts, width in ((qkv, 576), ([("model.layers.29.mlp.down_proj.weight", 576)], 1536)):
        weight = grids.read_q4(parts, width)
        assert weight is not None
        assert torch.equal(dequantize(weight), checkpoint.read_rows(parts, width, torch.float32))
    head = [("model.embed_tokens.weight", 49152)]
    weight = grids.read_q8(head, 576)
    assert weight is not None
    assert torch.equal(dequantize(weight), checkpoint.read_rows(head, 576, torch.float32))
    assert grids.read_q4(head, 576) is None
    assert grids.read_q8(qkv, 576) is None
    assert np.isfinite(weight.scale_NG.numpy()).all()
