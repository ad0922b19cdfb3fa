"""What one draw looked like: candidates before and after the settings, what each filter removed, the number drawn."""

from typing import Any

from torch import Tensor

from workers.sampling.philox import draw_uniform
from workers.sampling.sampler import Draw, Head, Kept, count_kept, has_filter, is_random, sort_head

TOP = 5


def explain_draw(logits_V: Tensor, draw: Draw, token: int) -> dict[str, Any]:
    """JSON-able facts of one sampled token; sorts the whole vocabulary, so only for requests that ask.

    `before` and `after` list at most five `{"token", "probability"}` in falling order: softmax of the logits, and what
    the token was drawn from. `removed` counts tokens by filter, `uniform` is None for greedy.
    """
    params, vocab = draw.params, len(logits_V)
    plain = sort_head(logits_V[None], [1.0], vocab)
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
    head = sort_head(logits_V[None], [params.temperature], vocab)
    cumulated_W = head.probs_RW[0].cumsum(dim=-1)
    kept = count_kept(head.probs_RW[0], cumulated_W, True, params) if has_filter(params) else Kept(vocab, vocab, vocab)
    assert kept is not None
    removed = {
        "top_k": vocab - kept.after_top_k,
        "top_p": kept.after_top_k - kept.after_top_p,
        "min_p": kept.after_top_p - kept.left,
    }
    after = _list_top(head, kept.left, float(cumulated_W[kept.left - 1]))
    uniform = draw_uniform(params.seed, draw.position)
    return facts | {"after": after, "removed": removed, "kept": kept.left, "uniform": uniform}


def _list_top(head: Head, kept: int, mass: float) -> list[dict[str, Any]]:
    num = min(TOP, kept)
    ids, probs = head.ids_RW[0, :num].tolist(), head.probs_RW[0, :num].tolist()
    return [{"token": token, "probability": prob / mass} for token, prob in zip(ids, probs, strict=True)]
