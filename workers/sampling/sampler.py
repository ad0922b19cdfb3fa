"""Logits to tokens for all rows of a step at once.

The settings apply in this order, each to what the one before left: temperature, top-k, top-p, min-p. In the order of
falling probability (ties: the lower id first) each filter keeps a prefix, so together they keep the first `n` tokens,
and the token is the first whose cumulated probability exceeds `uniform * mass of the n`. The head of that order is
enough for nearly every draw: the whole vocabulary is sorted only for rows that need it. A row's arithmetic is float64
and knows no other row, so the same logits, seed and position give the same token in any batch.

Shapes: R sampled rows, V vocabulary, W width of the sorted head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.errors import StepFailed
from workers.protocol import SamplingParams
from workers.sampling.philox import draw_uniform

HEAD_WIDTHS = (256, 4096)
"""Tokens sorted at first and, for rows that need more, next; then all of them. A row costs 0.3, 2 and 12 ms of 49,152.
"""

MIN_TEMPERATURE = 1e-5
"""A lower temperature is greedy."""


class Draw(NamedTuple):
    """How one row is sampled: `position` is the index of the output token in its stream."""

    params: SamplingParams
    position: int


class Head(NamedTuple):
    """The most likely tokens of some rows in falling order, with float64 probabilities of the tempered distribution."""

    ids_RW: Tensor
    probs_RW: Tensor
    is_whole: bool
    """Whether W is the vocabulary."""


def sample(logits_RV: Tensor, draws: Sequence[Draw], head_widths: Sequence[int] = HEAD_WIDTHS) -> list[int]:
    """One token id per row; raises `StepFailed` where a row has no finite maximum."""
    best_R, greedy_R = logits_RV.max(dim=-1)
    if not bool(torch.isfinite(best_R).all()):
        raise StepFailed(
            f"{int((~torch.isfinite(best_R)).sum())} of {len(draws)} sampled rows hold logits that are no numbers"
        )
    tokens: list[int] = greedy_R.tolist()
    rows = [row for row, draw in enumerate(draws) if is_random(draw.params)]
    vocab = logits_RV.shape[-1]
    for width in (*(width for width in head_widths if width < vocab), vocab):
        if not rows:
            break
        head = sort_head(logits_RV[rows], [draws[row].params.temperature for row in rows], width)
        picked = pick(head, [draws[row] for row in rows])
        for row, token in zip(rows, picked, strict=True):
            if token is not None:
                tokens[row] = token
        rows = [row for row, token in zip(rows, picked, strict=True) if token is None]
    return tokens


def is_random(params: SamplingParams) -> bool:
    """Whether a token is drawn; below MIN_TEMPERATURE logits / temperature overflows and the likeliest token is
    taken."""
    return params.temperature >= MIN_TEMPERATURE


def sort_head(logits_RV: Tensor, temperatures: Sequence[float], width: int) -> Head:
    """The `width` most likely tokens of each row after its temperature; the whole vocabulary where a tie crosses the
    edge.
    """
    temperatures_R1 = logits_RV.new_tensor(temperatures, dtype=torch.float64)[:, None]
    scaled_RV = logits_RV.to(torch.float64, copy=True).div_(temperatures_R1)
    scaled_RV.sub_(scaled_RV.amax(dim=-1, keepdim=True))  # an exponent never overflows
    mass_R1 = scaled_RV.exp().sum(dim=-1, keepdim=True)
    vocab = scaled_RV.shape[-1]
    if width < vocab:
        values_RW, ids_RW = scaled_RV.topk(width, dim=-1)
        if bool(((scaled_RV >= values_RW[:, -1:]).sum(dim=-1) > width).any()):
            width = vocab
    if width < vocab:
        # topk leaves the order of equals open: ids ascending first, then a stable sort by value.
        ids_RW, by_id_RW = ids_RW.sort(dim=-1)
        values_RW, by_value_RW = values_RW.gather(-1, by_id_RW).sort(dim=-1, descending=True, stable=True)
        ids_RW = ids_RW.gather(-1, by_value_RW)
    else:
        values_RW, ids_RW = scaled_RV.sort(dim=-1, descending=True, stable=True)
    return Head(ids_RW, values_RW.exp() / mass_R1, width == vocab)


def pick(head: Head, draws: Sequence[Draw]) -> list[int | None]:
    """The token of each row, or None where the head is too short to know."""
    cumulated_RW = head.probs_RW.cumsum(dim=-1)
    return [
        _pick_row(head.ids_RW[row], head.probs_RW[row], cumulated_RW[row], head.is_whole, draw)
        for row, draw in enumerate(draws)
    ]


def _pick_row(ids_W: Tensor, probs_W: Tensor, cumulated_W: Tensor, is_whole: bool, draw: Draw) -> int | None:
    uniform = draw_uniform(draw.params.seed, draw.position)
    if has_filter(draw.params):
        kept = count_kept(probs_W, cumulated_W, is_whole, draw.params)
        if kept is None:
            return None
        last, mass = kept.left - 1, float(cumulated_W[kept.left - 1])
    else:
        last, mass = len(ids_W) - 1, 1.0
    index = int(torch.searchsorted(cumulated_W, uniform * mass, right=True))
    if index > last and not is_whole and not has_filter(draw.params):
        return None
    return int(ids_W[min(index, last)])


def has_filter(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p may remove a token."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


class Kept(NamedTuple):
    """How many of the most likely tokens are left after each filter."""

    after_top_k: int
    after_top_p: int
    left: int


def count_kept(probs_W: Tensor, cumulated_W: Tensor, is_whole: bool, params: SamplingParams) -> Kept | None:
    """What the filters leave of one row in falling order; None where the head is too short to know."""
    width = len(probs_W)
    beyond = width if is_whole else width + 1
    top_k = min(params.top_k or beyond, beyond)
    if params.top_k and top_k > width:
        return None
    mass = float(cumulated_W[top_k - 1]) if params.top_k else 1.0
    top_p = min_p = beyond
    if params.top_p < 1:
        found = int(torch.searchsorted(cumulated_W, params.top_p * mass))
        top_p = found + 1 if found < width else beyond
    if params.min_p > 0:
        found = int((probs_W >= params.min_p * probs_W[0]).sum())
        min_p = found if found < width else beyond
    after_top_p = min(top_k, top_p)
    left = min(after_top_p, min_p)
    return Kept(top_k, after_top_p, left) if left <= width else None
