"""Penalties, biases and minimum lengths against their formulas; what asks for nothing stays as it is."""

import math

import pytest
import torch

from workers.errors import StepFailed
from workers.protocol import SamplingParams, TokenBias
from workers.sampling.adjust import NO_HISTORY, History, adjust_row, is_adjusted
from workers.sampling.logprobs import describe_token
from workers.sampling.sampler import Draw, sample

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, -0.25, 1.0])
HISTORY = History(prompt=[0, 1], output=[3, 3, 4])


def adjusted(params: SamplingParams, position: int = 3, history: History = HISTORY) -> list[float]:
    row = LOGITS.clone()
    adjust_row(row, params, position, history)
    return row.tolist()


def test_repetition_divides_what_is_positive_and_multiplies_the_rest() -> None:
    got = adjusted(SamplingParams(repetition_penalty=2.0))
    assert got == [1.0, -2.0, 0.5, 1.5, -0.5, 1.0]


def test_presence_and_frequency_count_the_output_alone() -> None:
    got = adjusted(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25))
    assert got == [2.0, -1.0, 0.5, 3.0 - 0.5 - 2 * 0.25, -0.25 - 0.5 - 0.25, 1.0]


def test_a_bias_is_added_after_the_penalties() -> None:
    got = adjusted(SamplingParams(repetition_penalty=2.0, logit_bias=(TokenBias(0, 10.0), TokenBias(5, -100.0))))
    assert got == [11.0, -2.0, 0.5, 1.5, -0.5, -99.0]


def test_stop_tokens_wait_for_min_tokens() -> None:
    params = SamplingParams(min_tokens=4, stop_token_ids=(3, 2))
    assert adjusted(params, position=3) == [2.0, -1.0, -math.inf, -math.inf, -0.25, 1.0]
    assert adjusted(params, position=4) == LOGITS.tolist()
    assert sample(LOGITS[None], [Draw(params, 3)]) == [0]
    assert sample(LOGITS[None], [Draw(params, 4)]) == [3]


def test_who_asks_for_nothing_is_left_alone() -> None:
    params = SamplingParams(temperature=0.7, top_k=3, stop_token_ids=(1,))
    assert not is_adjusted(params, 0)
    assert not params.looks_back
    assert adjusted(params) == LOGITS.tolist()


def test_a_batch_mixes_adjusted_and_plain_rows() -> None:
    rows = LOGITS.expand(3, -1).contiguous()
    banned = SamplingParams(logit_bias=(TokenBias(3, -100.0),))
    draws = [Draw(SamplingParams(), 0), Draw(banned, 0), Draw(SamplingParams(temperature=1.0, top_k=1), 0)]
    assert sample(rows, draws) == [3, 0, 3]
    assert rows[1].tolist() == LOGITS.tolist(), "the model's own logits stay for log probabilities"
    drawn = {sample(rows[:1], [Draw(SamplingParams(temperature=1.0, seed=1, logit_bias=banned.logit_bias), i)])[0]
             for i in range(300)}  # fmt: skip
    assert drawn == {0, 1, 2, 4, 5}


def test_rules_that_leave_no_token_fail_the_step() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(6)))
    with pytest.raises(StepFailed, match="1 of 1 sampled rows"):
        sample(LOGITS[None], [Draw(params, 0)])


def test_choices_of_one_seed_draw_apart() -> None:
    rows = torch.zeros(1, 1000)
    first = [sample(rows, [Draw(SamplingParams(temperature=1.0, seed=5, choice=c), 0)])[0] for c in range(8)]
    assert len(set(first)) == 8
    assert first == [sample(rows, [Draw(SamplingParams(temperature=1.0, seed=5, choice=c), 0)])[0] for c in range(8)]


def test_logprobs_are_those_of_softmax_over_the_models_logits() -> None:
    exact = torch.log_softmax(LOGITS.double(), dim=-1)
    told = describe_token(LOGITS, 2, 3)
    assert told.chosen == pytest.approx(float(exact[2]), abs=1e-6)
    assert [entry.token for entry in told.top] == [3, 0, 5]
    assert [entry.logprob for entry in told.top] == pytest.approx([float(exact[t]) for t in (3, 0, 5)], abs=1e-6)
    assert describe_token(LOGITS, 2, 0).top == ()
    assert len(describe_token(LOGITS, 2, 20).top) == 6


def test_the_empty_history_is_enough_for_settings_that_do_not_look_back() -> None:
    assert adjusted(SamplingParams(logit_bias=(TokenBias(1, 1.5),)), history=NO_HISTORY)[1] == 0.5


def test_what_is_all_but_impossible_is_told_as_openai_tells_it() -> None:
    told = describe_token(torch.tensor([0.0, -torch.inf]), 1, 2)
    assert told.chosen == told.top[1].logprob == -9999.0
    assert told.top[0].logprob == 0.0
