"""The compact decoder: every family of `families.py` over the op set, one flat batch per step.

Read this to see a model run. It knows which op follows which; what an op does is the backend's, how a family differs is
in the weights that `build.py` made. Shapes as in `workers/ops/base.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from workers.model.arch import DecoderSpec
from workers.model.collective import Parallel
from workers.model.paged_attention import StepFacts
from workers.ops.base import Ops, Span, StepTables
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
    def num_kv_heads(self) -> int:
        """In this rank's cache."""
        return self.weights.layers[0].attention.num_kv_heads

    @torch.inference_mode()
    def forward(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
        """Logits `[R, V]` float32 of the batch rows in `rows_R`; K and V of every token are written on the way, and
        `facts.on_layer` is called once each layer's are. In a group only rank 0 has all of V.
        """
        return self.run(ids_T, rows_R, make_tables(positions_T, facts), facts.data, facts.on_layer)

    @torch.inference_mode()
    def run(
        self, ids_T: Tensor, rows_R: Tensor, tables: StepTables, data: Tensor, on_layer: Callable[[int], None]
    ) -> Tensor:
        """As `Step.run`."""
        if self._step is not None:
            return self._step.run(ids_T, rows_R, tables, data, on_layer)
        ops, weights, parallel = self._ops, self.weights, self._parallel
        if parallel is None:
            return run_layers(ops, weights, ids_T, rows_R, tables, data, on_layer)
        x_TM = parallel.embed(ops, ids_T, weights.embedding, weights.embedding_scale)
        add, gather = parallel.collective.add, parallel.collective.gather
        return gather(run_blocks(ops, weights, x_TM, rows_R, tables, data, on_layer, add))


def run_layers(
    ops: Ops,
    weights: DecoderWeights,
    ids_T: Tensor,
    rows_R: Tensor,
    tables: StepTables,
    data: Tensor,
    on_layer: Callable[[int], None],
) -> Tensor:
    """The forward pass op by op; arguments and result as of `Step.run`."""
    x_TM = ops.embed(ids_T, weights.embedding, weights.embedding_scale)
    return run_blocks(ops, weights, x_TM, rows_R, tables, data, on_layer)


def run_blocks(
    ops: Ops,
    weights: DecoderWeights,
    x_TM: Tensor,
    rows_R: Tensor,
    tables: StepTables,
    data: Tensor,
    on_layer: Callable[[int], None],
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
        q_THD = ops.rotate_and_store(qkv_TN, layer.attention, tables, data[index])
        on_layer(index)
        attended_TK = ops.attend(q_THD, layer.attention, tables, data[index])
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


def make_tables(positions_T: Tensor, facts: StepFacts) -> StepTables:
    """The op set's view of a step.

    `gathered_rows` starts each span with the rows of K of head 0, block by block: row = block * 2 * num_kv_heads.
    """
    rows_per_block = 2 * facts.data.shape[3]
    spans, parts, entries = [], [], 0
    for span in facts.spans:
        spans.append(Span(span.first_row, span.num_tokens, span.first_position, entries, span.num_blocks))
        parts.append(facts.gathered_rows[span.first_gathered : span.first_gathered + span.num_blocks])
        entries += span.num_blocks
    return StepTables(positions_T, facts.block_of_T, facts.slot_of_T, torch.cat(parts) // rows_per_block, tuple(spans))
