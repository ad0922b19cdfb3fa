"""Any decoder-only architecture through the transformers classes, with our paged attention in their
`AttentionInterface`.

Correct first; about half the speed of a decoder of our own at batch 1. transformers builds no mask for an attention it
does not know and hands every keyword of the forward call down to it: that is how `StepFacts` arrive.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from workers.engine.state import StateSpec
from workers.errors import ModelRefused
from workers.model.arch import DecoderSpec, read_spec
from workers.model.loader import load_causal_lm
from workers.model.paged_attention import StepFacts, attend, write_kv
from workers.model.progress import Progress, ignore_progress
from workers.model.state import kv_state

ATTENTION = "baton_paged"
_UNSERVED = ("softcap", "s_aux", "position_bias", "head_mask", "sinks")
"""Keywords by which a layer asks for more than plain attention."""


def load_fallback(folder: Path, dtype: torch.dtype, progress: Progress = ignore_progress) -> "TransformersModel":
    """The model of `folder` over our attention; `runner/probe.py` proves that it works.

    Raises `ModelRefused` by name for what cannot be served and `ModelDamaged` for broken files.
    """
    spec = read_spec(folder)
    _register()
    return TransformersModel(load_causal_lm(folder, dtype, ATTENTION, progress), spec)


class TransformersModel:
    """A causal language model over a paged cache. One thread at a time."""

    def __init__(self, model: Any, spec: DecoderSpec) -> None:
        self.spec = spec
        self.dtype: torch.dtype = model.dtype
        self._model = model

    def state(self, dtype: Dtype) -> tuple[StateSpec, ...]:
        """One per layer. What the classes make of a window shows only as they ask for it, so every layer keeps all."""
        return kv_state(self.spec.num_kv_heads, self.spec.head_dim, [None] * self.spec.num_layers, dtype)

    @torch.inference_mode()
    def forward(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
        """Logits `[R, vocab]` float32 of the batch rows in `rows_R`; K and V of every token are written on the way."""
        out = self._model(
            input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, logits_to_keep=rows_R, baton=facts
        )
        logits_RV: Tensor = out.logits[0].float()
        return logits_RV


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _paged_attention)


def _paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, /, *, baton: StepFacts, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention signature: q, k, v `[1, heads, T, head_dim]` in, `[1, T, heads, head_dim]` out."""
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise ModelRefused(f"{type(module).__name__} asks for {name} in attention, which Baton does not serve yet")
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    write_kv(baton, module.layer_idx, key[0], value[0])
    return attend(baton, module.layer_idx, query[0], scale, kwargs.get("sliding_window"))[None], None
