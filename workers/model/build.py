"""A model folder to a decoder in memory: weights fused, quantized where asked, packed for the backend, one at a time.

Knows the names of checkpoints. Peak memory is the packed model and one fused matrix.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from workers.model.arch import DecoderSpec, Rope, make_spec, read_config
from workers.model.checkpoint import Checkpoint, Cut
from workers.model.collective import Parallel
from workers.model.decoder import Decoder
from workers.model.families import DecoderPlan, Experts, LayerPlan, plan_decoder
from workers.model.gguf_grids import GGUFGrids, open_grids
from workers.model.progress import Progress, ignore_progress
from workers.model.quantized import QuantizedRows
from workers.model.rope import make_rope_table
from workers.model.scheme import read_scheme
from workers.model.sharding import WHOLE, Shard, check_shard, check_tp_plan
from workers.model.slices import list_rows, take
from workers.ops.base import Ops
from workers.ops.weights import (
    GROUP,
    AttentionLayer,
    DecoderLayer,
    DecoderWeights,
    DenseMLP,
    DenseWeight,
    Int8Weight,
    Packed,
    Q4Weight,
    Q8Weight,
    RopeTable,
    RoutedMLP,
    Weight,
)
from workers.quantization import int4, int8

WeightMode = Literal["fp32", "bf16", "int8", "q4"]
"""fp32: exact. bf16: half the memory, float32 sums. int8: weights per row. q4: groups of 32, head of 8 bits per 32.
int8 and q4 round activations to 8 bits per 32."""

Parts = list[tuple[str, int]]
"""(tensor, rows) of a fused matrix."""

_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
}
"""Of the router, of an expert, and of its gate, up and down."""


def load_decoder(
    folder: Path,
    mode: WeightMode,
    ops: Ops,
    progress: Progress = ignore_progress,
    max_positions: int | None = None,
    parallel: Parallel | None = None,
) -> Decoder:
    """The decoder of `folder`, ready to run on the backend `ops`.

    `max_positions` bounds the context (default: what the model was made for). In mode q4 the grids of the GGUF file
    that the folder was converted from are taken as they are, and in modes q4 and int8 those of a quantized checkpoint
    where they fit (`docs/models.md`). With `parallel` only one rank's part is loaded: the same
    grid values as of the whole, in every mode. Raises `ModelRefused` where `families.py` does not know
    the model, `ModelDamaged` where its files do not fit their config.
    """
    config = read_config(folder)
    spec, plan = make_spec(config), plan_decoder(config)
    checkpoint, scheme = Checkpoint(folder, progress), read_scheme(config)
    rows = checkpoint if scheme is None else QuantizedRows(checkpoint, scheme)
    source = _Source(checkpoint, rows, open_grids(folder, config) if mode == "q4" else None, mode, ops)
    shard = parallel.shard if parallel is not None else WHOLE
    if parallel is not None:
        check_shard(shard, spec.num_heads, _inner_sizes(spec, plan))
        check_tp_plan(_read_tp_plan(config))
    weights = _Builder(source, spec, plan, max_positions or spec.max_positions, shard).build()
    progress("loading weights", 1.0)
    return Decoder(ops, weights, spec, torch.float32 if mode == "fp32" else torch.bfloat16, parallel)


def _read_tp_plan(config: Mapping[str, Any]) -> Mapping[str, str]:
    """How transformers splits the modules of the model among ranks, by their names; empty where it does not say."""
    from transformers import CONFIG_MAPPING  # a second that only a rank of a group pays

    known = CONFIG_MAPPING[config["model_type"]] if config.get("model_type") in CONFIG_MAPPING else None
    plan: Mapping[str, str] = getattr(known, "base_model_tp_plan", None) or {}
    return plan


def _inner_sizes(spec: DecoderSpec, plan: DecoderPlan) -> tuple[int, ...]:
    """Of the MLPs and experts that the model has."""
    return tuple(layer.experts.intermediate_size if layer.experts else spec.intermediate_size for layer in plan.layers)


def quantize(dense_NK: Tensor, mode: WeightMode, is_head: bool = False) -> Weight:
    """The weight in the grid of `mode`; bfloat16 where groups of 32 do not fit K."""
    if mode == "fp32":
        return DenseWeight(dense_NK.float())
    if mode == "bf16" or dense_NK.shape[1] % GROUP:
        return DenseWeight(dense_NK.to(torch.bfloat16))
    if mode == "int8":
        return Int8Weight(*int8.quantize_rows(dense_NK))
    if is_head:
        return Q8Weight(*int8.quantize_groups(dense_NK))
    return Q4Weight(*int4.quantize_groups(dense_NK))


class _Source:
    """Matrices of a checkpoint in the grid of a mode, packed."""

    def __init__(
        self, checkpoint: Checkpoint, rows: Checkpoint | QuantizedRows, grids: GGUFGrids | None, mode: WeightMode,
        ops: Ops,
    ) -> None:  # fmt: skip
        self.checkpoint = checkpoint
        self.ops = ops
        self.mode: WeightMode = mode
        self._rows = rows
        self._grids = grids

    def matrix(self, parts: Parts, width: int, cut: Cut, is_head: bool = False) -> Packed:
        """What `cut` keeps of the parts under each other."""
        weight = self._read_grid(parts, width, is_head)
        if weight is not None:
            return self.ops.pack(take(weight, list_rows(parts, cut.rows), cut.columns))
        if self.mode in ("fp32", "bf16"):
            stored = torch.bfloat16 if self.mode == "bf16" else torch.float32
            return self.ops.pack(DenseWeight(self._rows.read_rows(parts, width, stored, cut)))
        whole_rows = Cut(cut.rows, range(width))  # a scale may depend on numbers that another rank keeps
        return self.pack(self._rows.read_rows(parts, width, torch.float32, whole_rows), cut.columns, is_head)

    def _read_grid(self, parts: Parts, width: int, is_head: bool) -> Weight | None:
        """The numbers that a file has for this mode already; None where they are to be made."""
        if self._grids is not None:
            found = self._grids.read_q8(parts, width) if is_head else self._grids.read_q4(parts, width)
            if found is not None:
                return found
        if isinstance(self._rows, QuantizedRows):
            if self.mode == "int8":
                return self._rows.read_int8(parts, width)
            if self.mode == "q4" and not is_head:
                return self._rows.read_q4(parts, width)
        return None

    def pack(self, dense_NK: Tensor, columns: range, is_head: bool = False) -> Packed:
        return self.ops.pack(take(quantize(dense_NK, self.mode, is_head), None, columns))

    def dense(self, tensor: str, rows: int, width: int, kept: range) -> Packed:
        """Never quantized: float32, or bfloat16 for an embedding of a smaller mode."""
        stored = torch.float32 if self.mode == "fp32" or "embed" not in tensor else torch.bfloat16
        cut = Cut((kept,), range(width))
        return self.ops.pack(DenseWeight(self._rows.read_rows([(tensor, rows)], width, stored, cut)))


class _Builder:
    """Walks a plan and asks the source for what it names."""

    def __init__(self, source: _Source, spec: DecoderSpec, plan: DecoderPlan, max_positions: int, shard: Shard) -> None:
        self._source = source
        self._checkpoint = source.checkpoint
        self._spec = spec
        self._plan = plan
        self._max_positions = max_positions
        self._shard = shard
        self._heads = shard.heads(spec.num_heads, spec.num_kv_heads)
        self._ropes: dict[str, RopeTable] = {}

    def build(self) -> DecoderWeights:
        spec, plan, vocab = self._spec, self._plan, self._spec.vocab_size
        name = "model.embed_tokens.weight" if plan.tied else "lm_head.weight"
        kept, width = self._shard.vocabulary(vocab), spec.hidden_size
        head = self._source.matrix([(name, vocab)], width, Cut((kept,), range(width)), is_head=True)
        embedding = head if plan.tied else self._source.dense("model.embed_tokens.weight", vocab, width, kept)
        return DecoderWeights(
            embedding=embedding,
            embedding_scale=plan.embedding_scale,
            layers=tuple(self._layer(index, layer) for index, layer in enumerate(plan.layers)),
            norm_M=self._norm("model.norm"),
            norm_eps=plan.norm_eps,
            head=head,
            softcap=plan.softcap,
        )

    def _layer(self, index: int, layer: LayerPlan) -> DecoderLayer:
        spec, plan, name = self._spec, self._plan, f"model.layers.{index}"
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention = f"{name}.self_attn"
        qkv = [(f"{attention}.q_proj", q), (f"{attention}.k_proj", kv), (f"{attention}.v_proj", kv)]
        out = [(f"{attention}.o_proj", spec.hidden_size)]
        query, key = (_scale(heads, spec.head_dim) for heads in (self._heads.query, self._heads.kv))
        width, rows = spec.hidden_size, (query, key, key)
        mlp_norm = "pre_feedforward_layernorm" if plan.has_after_norms else "post_attention_layernorm"
        return DecoderLayer(
            attention=self._attention(attention, layer),
            attention_norm_M=self._norm(f"{name}.input_layernorm"),
            qkv=self._source.matrix(_weights(qkv), width, Cut(rows, range(width))),
            qkv_bias_N=self._vectors(_biases(qkv), rows) if plan.has_qkv_bias else None,
            out=self._source.matrix(_weights(out), q, Cut((range(width),), query)),
            out_bias_M=self._sum_bias(_biases(out)) if plan.has_out_bias else None,
            after_attention_norm_M=self._norm(f"{name}.post_attention_layernorm") if plan.has_after_norms else None,
            mlp_norm_M=self._norm(f"{name}.{mlp_norm}"),
            mlp=self._experts(name, layer.experts) if layer.experts else self._mlp(f"{name}.mlp"),
            after_mlp_norm_M=self._norm(f"{name}.post_feedforward_layernorm") if plan.has_after_norms else None,
        )

    def _attention(self, name: str, layer: LayerPlan) -> AttentionLayer:
        spec, plan, query = self._spec, self._plan, self._heads.query
        return AttentionLayer(
            num_heads=len(query),
            num_kv_heads=len(self._heads.kv),
            head_dim=spec.head_dim,
            scale=plan.attention_scale,
            rope=self._rope(layer.rope),
            window=layer.window,
            q_norm_D=self._norm(f"{name}.q_norm", spec.head_dim) if plan.has_qk_norm else None,
            k_norm_D=self._norm(f"{name}.k_norm", spec.head_dim) if plan.has_qk_norm else None,
            norm_eps=plan.norm_eps,
            sinks_H=self._vectors([(f"{name}.sinks", spec.num_heads)], (self._heads.query,))
            if plan.has_sinks
            else None,
        )

    def _mlp(self, name: str) -> DenseMLP:
        spec = self._spec
        gate_up = [(f"{name}.gate_proj", spec.intermediate_size), (f"{name}.up_proj", spec.intermediate_size)]
        down = [(f"{name}.down_proj", spec.hidden_size)]
        has_bias, inner = self._plan.has_mlp_bias, self._shard.inner(spec.intermediate_size)
        return self._make_mlp(
            _weights(gate_up), _weights(down), spec.intermediate_size,
            self._vectors(_biases(gate_up), (inner, inner)) if has_bias else None,
            self._sum_bias(_biases(down)) if has_bias else None,
        )  # fmt: skip

    def _make_mlp(
        self, gate_up: Parts, down: Parts, size: int, gate_up_bias_N: Tensor | None, down_bias_M: Tensor | None
    ) -> DenseMLP:
        """This rank's columns of `size` intermediate ones."""
        inner, width = self._shard.inner(size), self._spec.hidden_size
        return DenseMLP(
            gate_up=self._source.matrix(gate_up, width, Cut((inner, inner), range(width))),
            down=self._source.matrix(down, size, Cut((range(width),), inner)),
            activation=self._plan.activation,
            gate_up_bias_N=gate_up_bias_N,
            down_bias_M=down_bias_M,
        )

    def _experts(self, name: str, experts: Experts) -> RoutedMLP:
        router, router_bias = self._router(name, experts)
        make = self._fused_expert if experts.layout == "gpt_oss" else self._named_expert
        return RoutedMLP(
            router=router,
            router_bias_E=router_bias,
            top_k=experts.top_k,
            renormalize=experts.renormalize,
            experts=tuple(make(name, experts, number) for number in range(experts.num_experts)),
        )

    def _router(self, name: str, experts: Experts) -> tuple[Packed, Tensor | None]:
        if experts.layout == "gpt_oss":
            router = f"{name}.mlp.router"
            bias = self._vectors([(f"{router}.bias", experts.num_experts)], (range(experts.num_experts),))
        else:
            router, bias = f"{name}.{_EXPERT_NAMES[experts.layout][0]}", None
        count = experts.num_experts
        return self._source.dense(f"{router}.weight", count, self._spec.hidden_size, range(count)), bias

    def _named_expert(self, name: str, experts: Experts, number: int) -> DenseMLP:
        _, prefix, (gate, up, down) = _EXPERT_NAMES[experts.layout]
        each, size, width = f"{name}.{prefix.format(number)}", experts.intermediate_size, self._spec.hidden_size
        gate_up = _weights([(each + gate, size), (each + up, size)])
        return self._make_mlp(gate_up, _weights([(each + down, width)]), size, None, None)

    def _fused_expert(self, name: str, experts: Experts, number: int) -> DenseMLP:
        """gpt-oss: all experts in one tensor, transposed, the rows of gate and up alternating."""
        base, size, width = f"{name}.mlp.experts", experts.intermediate_size, self._spec.hidden_size
        count, read = experts.num_experts, self._checkpoint.read
        gate_up_KN = read(f"{base}.gate_up_proj", (count, width, 2 * size))[number]
        gate_up_bias_N = read(f"{base}.gate_up_proj_bias", (count, 2 * size))[number].float()
        down_KN = read(f"{base}.down_proj", (count, size, width))[number]
        down_bias_M = read(f"{base}.down_proj_bias", (count, width))[number].float()
        inner = self._shard.inner(size)
        gate, up = slice(2 * inner.start, 2 * inner.stop, 2), slice(2 * inner.start + 1, 2 * inner.stop, 2)
        return DenseMLP(
            gate_up=self._source.pack(torch.cat((gate_up_KN[:, gate].T, gate_up_KN[:, up].T)), range(width)),
            down=self._source.pack(down_KN.T.contiguous(), inner),
            activation=self._plan.activation,
            gate_up_bias_N=self._place(torch.cat((gate_up_bias_N[gate], gate_up_bias_N[up]))),
            down_bias_M=self._place(down_bias_M) if self._shard.is_first else None,
        )

    def _norm(self, name: str, size: int | None = None) -> Tensor:
        weight = self._checkpoint.read(f"{name}.weight", (size or self._spec.hidden_size,))
        return self._place(weight.float() + self._plan.norm_offset)

    def _vectors(self, parts: Parts, kept: tuple[range, ...]) -> Tensor:
        """What is kept of each, one after the other, float32."""
        found = [
            self._checkpoint.read(tensor, (size,))[own.start : own.stop].float()
            for (tensor, size), own in zip(parts, kept, strict=True)
        ]
        return self._place(torch.cat(found))

    def _sum_bias(self, parts: Parts) -> Tensor | None:
        """Of a product that the ranks add up: one of them has it."""
        return self._vectors(parts, tuple(range(size) for _, size in parts)) if self._shard.is_first else None

    def _place(self, vector: Tensor) -> Tensor:
        return vector.to(self._source.ops.device)

    def _rope(self, rope: Rope) -> RopeTable:
        """Layers of equal rope share a table."""
        key = repr(rope)
        if key not in self._ropes:
            self._ropes[key] = make_rope_table(rope, self._max_positions, self._source.ops.device)
        return self._ropes[key]


def _scale(items: range, size: int) -> range:
    """The rows of items of `size` rows each."""
    return range(items.start * size, items.stop * size)


def _weights(parts: Parts) -> Parts:
    return [(f"{name}.weight", rows) for name, rows in parts]


def _biases(parts: Parts) -> Parts:
    return [(f"{name}.bias", rows) for name, rows in parts]
