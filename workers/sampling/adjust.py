"""What a request asks to be done to its logits before anything is drawn: penalties, biases, tokens that come too soon.

In this order, each on what the one before left:

    repetition penalty r   of every token in prompt or output: l > 0 becomes l / r, else l * r (Keskar, "CTRL", 2019)
    presence, frequency    of every token in the output: l - presence - frequency * count (OpenAI API reference)
    logit_bias             l + bias
    min_tokens             stop tokens cannot come before that many outputs
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.protocol import SamplingParams


class History(NamedTuple):
    """The tokens of one stream so far; empty where the request's settings do not look at them."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


NO_HISTORY = History()


def is_adjusted(params: SamplingParams, position: int) -> bool:
    """Whether `adjust_row` changes anything for output token `position`."""
    return params.looks_back or bool(params.logit_bias) or position < params.min_tokens


def adjust_row(logits_V: Tensor, params: SamplingParams, position: int, history: History) -> None:
    """Changes the logits of one row in place as `params` asks."""
    if params.repetition_penalty != 1.0:
        _penalize_repetition(logits_V, params.repetition_penalty, {*history.prompt, *history.output})
    if params.presence_penalty or params.frequency_penalty:
        _penalize_output(logits_V, params, history.output)
    if params.logit_bias:
        ids_B = _as_ids((bias.token for bias in params.logit_bias), logits_V)
        logits_V[ids_B] += logits_V.new_tensor([bias.bias for bias in params.logit_bias])
    if position < params.min_tokens and params.stop_token_ids:
        logits_V[_as_ids(params.stop_token_ids, logits_V)] = -torch.inf


def _penalize_repetition(logits_V: Tensor, penalty: float, seen: Iterable[int]) -> None:
    ids_S = _as_ids(seen, logits_V)
    old_S = logits_V[ids_S]
    logits_V[ids_S] = torch.where(old_S > 0, old_S / penalty, old_S * penalty)


def _penalize_output(logits_V: Tensor, params: SamplingParams, output: Sequence[int]) -> None:
    counts = Counter(output)
    ids_S = _as_ids(counts, logits_V)
    counts_S = logits_V.new_tensor(list(counts.values()))
    logits_V[ids_S] -= params.presence_penalty + params.frequency_penalty * counts_S


def _as_ids(ids: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=like.device)
