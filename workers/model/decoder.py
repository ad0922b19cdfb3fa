"""The compact decoder: every family of `families.py` over the op set, one flat batch per step.

Read this to see a model run. It knows which op follows which; what an op does is the backend's, how a family differs is
in the weights that `build.py` made. Shapes as in `workers/ops/base.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kv_transfer.layout import Dtype
from workers.engine.state import StateSpec
from workers.model.arch import DecoderSpec
from workers.model.collective import Parallel
from workers.model.paged_attention import StepFacts
from workers.model.state import kv_state
from workers.ops.base import Ops, Step
from workers.ops.weights import DecoderWeights, DenseMLP


class Decoder:
    """A causal language model over a paged cache. One thread at a time. Implements `runner/probe.py`'s `Model`."""

    def __init__(
        self,
        ops: Ops,
        weights: DecoderWeights,
        spec: DecoderSpec,
        dtype: torch.dtype,
        parallel: Parallel | None = None,
    ) -> None:
        """`parallel`: the weights are one rank's part, and `forward` runs on every rank of the group at once."""
        self.spec = spec
        self.dtype = dtype
        """How exact its numbers are: float32, or bfloat16 where weights or activations are rounded to fewer bits."""
        self.weights = weights
        self._ops = ops
        self._parallel = parallel
        step = ops.make_step(weights)
        self._step = step if parallel is None else None

    @property
    def step(self) -> Step | None:
        """The backend's whole step, where it has one and nothing is shared among ranks."""
        return self._step

    @property
    def num_kv_heads(self) -> int:
        """In this rank's cache."""
        return self.weights.layers[0].attention.num_kv_heads

    def forward(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
        """Logits `[R, V]` float32 of the batch rows in `rows_R`; K and V of every token are written on the way, and
        `facts.on_layer` is called once each layer's are. In a group only rank 0 has all of V.
        """
        return self.run(ids_T, rows_R, facts)

    def run(self, ids_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
        """As `forward`; positions stand in the tables, too."""
        if self._step is not None and len(facts.tables) == 1:
            return self._step.run(ids_T, rows_R, facts.tables[0], facts.data, facts.on_layer)
        return self._run_ops(ids_T, rows_R, facts)

    @torch.inference_mode()
    def _run_ops(self, ids_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
        ops, weights, parallel = self._ops, self.weights, self._parallel
        if parallel is None:
            return run_layers(ops, weights, ids_T, rows_R, facts)
        x_TM = parallel.embed(ops, ids_T, weights.embedding, weights.embedding_scale)
        add, gather = parallel.collective.add, parallel.collective.gather
        return gather(run_blocks(ops, weights, x_TM, rows_R, facts, add))

    def state(self, dtype: Dtype) -> tuple[StateSpec, ...]:
        """One per layer, of this rank's heads: a layer with a window lets go of what slid out."""
        windows = [layer.attention.window for layer in self.weights.layers]
        return kv_state(self.num_kv_heads, self.spec.head_dim, windows, dtype)


def run_layers(ops: Ops, weights: DecoderWeights, ids_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
    """The forward pass op by op; as `Step.run`, whatever the state groups of the layers."""
    x_TM = ops.embed(ids_T, weights.embedding, weights.embedding_scale)
    return run_blocks(ops, weights, x_TM, rows_R, facts)


def run_blocks(
    ops: Ops,
    weights: DecoderWeights,
    x_TM: Tensor,
    rows_R: Tensor,
    facts: StepFacts,
    add: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The layers and the head after the embedding, which is changed. `add` sums what the ranks of a group computed of
    one block.
    """
    eps = weights.norm_eps
    delta_TM: Tensor | None = None  # what the last block adds to x; the next norm adds it
    for index, layer in enumerate(weights.layers):
        normed_TM = ops.norm(x_TM, layer.attention_norm_M, eps, delta_TM)
        qkv_TN = ops.linear(normed_TM, layer.qkv, layer.qkv_bias_N)
        tables, cache_B2JSD = facts.of_layer(index)
        q_THD = ops.rotate_and_store(qkv_TN, layer.attention, tables, cache_B2JSD)
        facts.on_layer(index)
        attended_TK = ops.attend(q_THD, layer.attention, tables, cache_B2JSD)
        delta_TM = ops.linear(attended_TK, layer.out, layer.out_bias_M)
        delta_TM = delta_TM if add is None else add(delta_TM)
        if layer.after_attention_norm_M is not None:
            delta_TM = ops.norm(delta_TM, layer.after_attention_norm_M, eps)
        normed_TM = ops.norm(x_TM, layer.mlp_norm_M, eps, delta_TM)
        mlp = layer.mlp
        delta_TM = ops.dense_mlp(normed_TM, mlp) if isinstance(mlp, DenseMLP) else ops.experts(normed_TM, mlp)
        delta_TM = delta_TM if add is None else add(delta_TM)
        if layer.after_mlp_norm_M is not None:
            delta_TM = ops.norm(delta_TM, layer.after_mlp_norm_M, eps)
    assert delta_TM is not None, "a model has layers"
    normed_RM = ops.norm(x_TM[rows_R], weights.norm_M, eps, delta_TM[rows_R])
    return ops.head(normed_RM, weights.head, weights.softcap)
