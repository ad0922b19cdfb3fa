"""Logits to tokens for all rows of a step at once.

Greedy rows take the maximum (ties: the lower id). For a random row the settings apply in this order, each to what the
one before left: temperature, top-k, top-p, min-p. Each filter keeps the likeliest tokens (ties: the lower id first), so
together they keep the first `n` of the falling order. The token is then the first, in the order of ids, whose cumulated
probability exceeds `uniform * mass of the n`. Only the head of the falling order is sorted, and nothing where no filter
is set. A row's arithmetic is float64 and knows no other row, so the same logits, seed, choice and position give the
same token in any batch.

Shapes: R sampled rows, V vocabulary, W width of the sorted head, N tokens kept.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.errors import StepFailed
from workers.ops.base import DrawRows, FindLargest, RowDraw
from workers.protocol import SamplingParams
from workers.sampling.adjust import NO_HISTORY, History, adjust_row, is_adjusted
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
    history: History = NO_HISTORY

    @property
    def uniform(self) -> float:
        """The number in [0, 1) that decides this token, whatever the logits."""
        return draw_uniform(self.params.seed, self.position, self.params.choice)


class Head(NamedTuple):
    """The most likely tokens of one row in falling order, with float64 probabilities of the tempered distribution."""

    ids_W: Tensor
    probs_W: Tensor
    is_whole: bool
    """Whether W is the vocabulary."""


def find_largest(logits_RV: Tensor) -> tuple[list[float], list[int]]:
    """A `FindLargest` for any tensor."""
    if logits_RV.device.type != "cpu":
        best_R, places_R = logits_RV.max(dim=-1)
        return best_R.tolist(), places_R.tolist()
    # numpy's search is vectorized and torch's is not: 4 against 46 us a row of 49,152.
    rows = logits_RV.numpy()
    places = rows.argmax(axis=-1)
    return rows[np.arange(len(rows)), places].tolist(), places.tolist()


def sample(
    logits_RV: Tensor,
    draws: Sequence[Draw],
    draw_rows: DrawRows | None = None,
    find: FindLargest = find_largest,
) -> list[int]:
    """One token id per row; raises `StepFailed` where a row has no finite maximum.

    Rows that ask for nothing cost their maximum and no more. `draw_rows` and `find` are the backend's own
    ways, where it has them.
    """
    tokens = _take_largest(logits_RV, find)
    adjusted = [row for row, draw in enumerate(draws) if is_adjusted(draw.params, draw.position)]
    changed = set(adjusted)
    _draw_into(tokens, logits_RV, [(row, row) for row in range(len(draws)) if row not in changed], draws, draw_rows)
    if adjusted:
        changed_AV = torch.stack([logits_RV[row] for row in adjusted])
        for logits_V, row in zip(changed_AV, adjusted, strict=True):
            adjust_row(logits_V, draws[row].params, draws[row].position, draws[row].history)
        for row, token in zip(adjusted, _take_largest(changed_AV, find), strict=True):
            tokens[row] = token
        _draw_into(tokens, changed_AV, list(enumerate(adjusted)), draws, draw_rows)
    return tokens


def _take_largest(logits_RV: Tensor, find: FindLargest) -> list[int]:
    best, tokens = find(logits_RV)
    num_bad = sum(not math.isfinite(logit) for logit in best)
    if num_bad:
        raise StepFailed(f"{num_bad} of {len(best)} sampled rows hold logits that are no numbers")
    return tokens


def _draw_into(
    tokens: list[int], logits_RV: Tensor, rows: list[tuple[int, int]], draws: Sequence[Draw], draw_rows: DrawRows | None
) -> None:
    """Puts the tokens of random rows in their place; `rows` are (row of the logits, index of the draw)."""
    asked = [(row, index) for row, index in rows if is_random(draws[index].params)]
    if not asked:
        return
    wanted = [_describe(row, draws[index]) for row, index in asked]
    drawn = (draw_rows or draw_exactly)(logits_RV, wanted)
    for (_, index), token in zip(asked, drawn, strict=True):
        tokens[index] = token


def _describe(row: int, draw: Draw) -> RowDraw:
    params = draw.params
    return RowDraw(row, params.temperature, params.top_k, params.top_p, params.min_p, draw.uniform)


def draw_exactly(logits_RV: Tensor, draws: Sequence[RowDraw], head_widths: Sequence[int] = HEAD_WIDTHS) -> list[int]:
    """The rules above in float64: the oracle of every backend's own way. A `DrawRows`."""
    return [_draw_row(logits_RV[draw.row], draw, head_widths) for draw in draws]


def is_random(params: SamplingParams) -> bool:
    """Whether a token is drawn; below MIN_TEMPERATURE logits / temperature overflows and the likeliest token is
    taken."""
    return params.temperature >= MIN_TEMPERATURE


def _draw_row(logits_V: Tensor, draw: RowDraw, head_widths: Sequence[int]) -> int:
    scaled_V = temper(logits_V, draw.temperature)
    weights_V = scaled_V.exp()
    if not has_filter(draw):
        return _pick(weights_V, draw.uniform)
    vocab, mass = len(scaled_V), weights_V.sum()
    for width in (*(width for width in head_widths if width < vocab), vocab):
        head = sort_head(scaled_V, mass, width)
        kept = count_kept(head, draw)
        if kept is not None:
            ids_N, order_N = head.ids_W[: kept.left].sort()
            return int(ids_N[_pick(head.probs_W[: kept.left][order_N], draw.uniform)])
    raise AssertionError("the whole vocabulary is always wide enough")


def temper(logits_V: Tensor, temperature: float) -> Tensor:
    """float64 logits over the temperature, the largest one 0: an exponent never overflows."""
    scaled_V = logits_V.to(torch.float64, copy=True).div_(temperature)
    return scaled_V.sub_(scaled_V.max())


def _pick(weights_N: Tensor, uniform: float) -> int:
    """The first index whose cumulated weight exceeds uniform * the whole."""
    cumulated_N = weights_N.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulated_N, uniform * cumulated_N[-1], right=True))
    if index == len(weights_N):  # rounding: the last that can come at all
        return int(weights_N.nonzero()[-1])
    return index


def sort_head(scaled_V: Tensor, mass: Tensor, width: int) -> Head:
    """The `width` most likely tokens of a tempered row; the whole vocabulary where a tie crosses the edge."""
    vocab = len(scaled_V)
    if width < vocab:
        values_W, ids_W = scaled_V.topk(width)
        if int((scaled_V >= values_W[-1]).sum()) > width:
            width = vocab
    if width < vocab:
        # topk leaves the order of equals open: ids ascending first, then a stable sort by value.
        ids_W, by_id_W = ids_W.sort()
        values_W, by_value_W = values_W[by_id_W].sort(descending=True, stable=True)
        ids_W = ids_W[by_value_W]
    else:
        values_W, ids_W = scaled_V.sort(descending=True, stable=True)
    return Head(ids_W, values_W.exp() / mass, width == vocab)


def has_filter(params: SamplingParams | RowDraw) -> bool:
    """Whether top-k, top-p or min-p may remove a token."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


class Kept(NamedTuple):
    """How many of the most likely tokens are left after each filter."""

    after_top_k: int
    after_top_p: int
    left: int


def count_kept(head: Head, params: SamplingParams | RowDraw) -> Kept | None:
    """What the filters leave of one row in falling order; None where the head is too short to know."""
    probs_W, cumulated_W = head.probs_W, head.probs_W.cumsum(dim=-1)
    width = len(probs_W)
    beyond = width if head.is_whole else width + 1
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
