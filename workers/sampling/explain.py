"""What one draw looked like: candidates before and after the settings, what each filter removed, the number drawn."""

from typing import Any

from torch import Tensor

from workers.sampling.adjust import adjust_row
from workers.sampling.sampler import (
    Draw,
    Head,
    Kept,
    count_kept,
    has_filter,
    is_random,
    sort_head,
    temper,
)

TOP = 5


def explain_draw(logits_V: Tensor, draw: Draw, token: int) -> dict[str, Any]:
    """JSON-able facts of one sampled token; sorts the whole vocabulary, so only for requests that ask.

    `before` and `after` list at most five `{"token", "probability"}` in falling order: softmax of the logits, and what
    the token was drawn from. `removed` counts tokens by filter, `uniform` is None for greedy.
    """
    params, vocab = draw.params, len(logits_V)
    plain = _sort_whole(logits_V, 1.0)
    facts: dict[str, Any] = {
        "token": token,
        "position": draw.position,
        "vocab": vocab,
        "before": _list_top(plain, vocab, 1.0),
        "temperature": params.temperature,
    }
    if not is_random(params):
        after = [{"token": token, "probability": 1.0}]
        return facts | {"after": after, "removed": {"greedy": vocab - 1}, "kept": 1, "uniform": None}
    adjusted_V = logits_V.clone()
    adjust_row(adjusted_V, params, draw.position, draw.history)
    head = _sort_whole(adjusted_V, params.temperature)
    kept = count_kept(head, params) if has_filter(params) else Kept(vocab, vocab, vocab)
    assert kept is not None
    removed = {
        "top_k": vocab - kept.after_top_k,
        "top_p": kept.after_top_k - kept.after_top_p,
        "min_p": kept.after_top_p - kept.left,
    }
    after = _list_top(head, kept.left, float(head.probs_W[: kept.left].sum()))
    return facts | {"after": after, "removed": removed, "kept": kept.left, "uniform": draw.uniform}


def _sort_whole(logits_V: Tensor, temperature: float) -> Head:
    scaled_V = temper(logits_V, temperature)
    return sort_head(scaled_V, scaled_V.exp().sum(), len(scaled_V))


def _list_top(head: Head, kept: int, mass: float) -> list[dict[str, Any]]:
    num = min(TOP, kept)
    ids, probs = head.ids_W[:num].tolist(), head.probs_W[:num].tolist()
    return [{"token": token, "probability": prob / mass} for token, prob in zip(ids, probs, strict=True)]
