"""Log probabilities of a sampled token and of the likeliest ones: natural logarithms of softmax over the model's own
logits, before penalties, biases, masks, temperature and filters."""

from typing import NamedTuple

import torch
from torch import Tensor


class Logprobs(NamedTuple):
    """Of one output token."""

    chosen: float
    """Of the token that was sampled."""
    top: tuple[tuple[int, float], ...]
    """(token, log probability) of the likeliest tokens, falling; among equals the lower id comes first."""


def describe_token(logits_V: Tensor, token: int, num_top: int) -> Logprobs:
    """The facts of one row; `num_top` >= 0 alternatives, the chosen token among them or not."""
    mass = torch.logsumexp(logits_V, dim=-1)
    chosen = float(logits_V[token] - mass)
    if not num_top:
        return Logprobs(chosen, ())
    values_A, ids_A = logits_V.topk(min(num_top, len(logits_V)))
    pairs = sorted(zip(ids_A.tolist(), (values_A - mass).tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return Logprobs(chosen, tuple(pairs))
