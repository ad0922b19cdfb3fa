"""What `explain` tells about a draw adds up."""

import json

import pytest
import torch

from workers.protocol import SamplingParams
from workers.sampling.explain import explain_draw
from workers.sampling.philox import draw_uniform
from workers.sampling.sampler import Draw, sample

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0, 2.5, -4.0, 0.5])


def test_filters_and_candidates_add_up() -> None:
    draw = Draw(SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.2, seed=5), 3)
    token = sample(LOGITS[None], [draw])[0]
    facts = explain_draw(LOGITS, draw, token)
    json.dumps(facts)
    plain = LOGITS.double().softmax(-1)
    assert [c["token"] for c in facts["before"]] == [1, 5, 2, 3, 7]
    assert [c["probability"] for c in facts["before"]] == pytest.approx(plain[[1, 5, 2, 3, 7]].tolist())
    assert facts["removed"]["top_k"] == 2
    assert facts["kept"] == 8 - sum(facts["removed"].values())
    assert sum(c["probability"] for c in facts["after"]) == pytest.approx(1.0)
    assert len(facts["after"]) == facts["kept"]
    assert token in [c["token"] for c in facts["after"]]
    assert facts["uniform"] == draw_uniform(5, 3)


def test_without_filters_nothing_is_removed() -> None:
    facts = explain_draw(LOGITS, Draw(SamplingParams(temperature=1.0), 0), 1)
    assert facts["removed"] == {"top_k": 0, "top_p": 0, "min_p": 0}
    for before, after in zip(facts["before"], facts["after"], strict=True):
        assert after == {"token": before["token"], "probability": pytest.approx(before["probability"])}


def test_greedy_draws_nothing() -> None:
    facts = explain_draw(LOGITS, Draw(SamplingParams(), 0), 1)
    assert (facts["uniform"], facts["kept"], facts["after"]) == (None, 1, [{"token": 1, "probability": 1.0}])
