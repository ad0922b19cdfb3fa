"""Line 1 for quantized weights: teacher-forced on the oracle's own greedy text, each token that a mode would choose is
among the oracle's top 5; KL and top-1 agreement keep the bounds of docs/models.md. With the KV cache that serves them.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.accept.engine.conftest import GetCase
from tests.support.bounds import read_bounds
from tests.support.decoder_runs import compute_logits, load
from tests.support.native_runs import load_native, logits_in_pieces
from tests.support.oracle import load_oracle
from workers.model.build import WeightMode

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(3600)]

ONE_MISS = (
    "at 1 of 552 places, where the oracle's six likeliest tokens have 0.094 to 0.069, int8 by native chooses the sixth"
)
Truth = tuple[tuple[int, ...], int, Tensor]
"""(prompt and answer, length of the prompt, the oracle's logits after each token)."""


@pytest.fixture(scope="module")
def truths(get_case: GetCase) -> list[Truth]:
    case = get_case("smollm2")
    model, found = load_oracle(case.folder), []
    for each in case.expected:
        text = each.prompt + each.tokens[:-1]
        with torch.inference_mode():
            found.append((text, len(each.prompt), model(torch.tensor([text])).logits[0]))
    return found


def compute(folder: Path, backend: str, mode: WeightMode, texts: list[tuple[int, ...]]) -> list[Tensor]:
    if backend == "reference":
        model = load(folder, mode)
        return [compute_logits(model, text) for text in texts]
    native = load_native(folder, mode, 1)
    return [logits_in_pieces(native, "bf16", text, [len(text) // 2, len(text) - len(text) // 2]) for text in texts]


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("mode", ["bf16", "int8", "q4"])
def test_teacher_forced_on_the_oracles_text(
    request: pytest.FixtureRequest, get_case: GetCase, truths: list[Truth], backend: str, mode: WeightMode,
    is_full: bool,
) -> None:  # fmt: skip
    if (backend, mode, is_full) == ("native", "int8", True):
        request.applymarker(pytest.mark.xfail(strict=True, reason=ONE_MISS))
    most_kl, least_agreement, _ = read_bounds()[mode]
    kls, agreements = [], []
    found = compute(get_case("smollm2").folder, backend, mode, [text for text, _, _ in truths])
    num_outside = 0
    for found_TV, (_, num_prompt, exact_TV) in zip(found, truths, strict=True):
        chosen_T = found_TV.argmax(-1)
        in_top5_T = (exact_TV.topk(5).indices == chosen_T[:, None]).any(-1)
        num_outside += int((~in_top5_T[num_prompt - 1 :]).sum())
        log_p_TV, log_q_TV = exact_TV.log_softmax(-1), found_TV.log_softmax(-1)
        kls.append((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1))
        agreements.append(chosen_T == exact_TV.argmax(-1))
    kl, agreement = float(torch.cat(kls).mean()), float(torch.cat(agreements).float().mean())
    print(f"{mode} by {backend}: KL {kl:.5f}, top-1 agreement {agreement:.4f}, {num_outside} outside the top 5")
    assert num_outside == 0
    assert 0 < kl <= most_kl
    # Over the slice's 300 places the agreement of a sample has a standard deviation of 0.013.
    assert agreement >= least_agreement - (0 if is_full else 2 * 0.013)
