"""Log probabilities of a sampled token and of the likeliest ones; see `workers.protocol.Logprobs`."""

import torch
from torch import Tensor

from workers.protocol import Logprobs, TopToken

LEAST = -9999.0


def describe_token(logits_V: Tensor, token: int, num_top: int) -> Logprobs:
    """The facts of one row; `num_top` >= 0 alternatives, the chosen token among them or not."""
    mass = torch.logsumexp(logits_V, dim=-1)
    chosen = _bound(float(logits_V[token] - mass))
    if not num_top:
        return Logprobs(chosen, ())
    values_A, ids_A = logits_V.topk(min(num_top, len(logits_V)))
    pairs = sorted(zip(ids_A.tolist(), (values_A - mass).tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return Logprobs(chosen, tuple(TopToken(one, _bound(value)) for one, value in pairs))


def _bound(value: float) -> float:
    return min(0.0, max(LEAST, value))
