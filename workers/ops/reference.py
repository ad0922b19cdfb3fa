"""The op set in plain torch on any device: says what each op means, and serves where no faster backend can.

In float64 it is the oracle of every kernel. Weights of any grid are held dense in the backend's dtype, so quantized
modes save no memory here; their inputs are rounded as `Ops.linear` says. Shapes as in `base.py`; G = H / J query heads
of one KV head, C context of one request, t tokens of one request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from workers.ops.base import Span, StepTables
from workers.ops.mlp import run_dense_mlp, run_experts
from workers.ops.weights import (
    Activation,
    AttentionLayer,
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

CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702
"""Of gpt-oss's activation."""


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    data_NK: Tensor
    rounds_inputs: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.data_NK.shape[0], self.data_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.data_NK.nbytes


class ReferenceOps:
    """Implements `Ops`."""

    name = "reference"
    key_is_dim_major = False

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)

    def pack(self, weight: Weight) -> ReferenceWeight:
        rounds_inputs = not isinstance(weight, DenseWeight)
        return ReferenceWeight(dequantize(weight, self.dtype).to(self.device), rounds_inputs)

    def embed(self, ids_T: Tensor, table: Packed, scale: float) -> Tensor:
        # The factor is rounded to the activations' dtype first, as the families that have one do.
        return _dense(table).data_NK[ids_T] * torch.tensor(scale, dtype=self.dtype)

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float, delta_TM: Tensor | None = None) -> Tensor:
        if delta_TM is not None:
            x_TM += delta_TM
        return _rms_norm(x_TM, weight_M, eps)

    def linear(self, x_TK: Tensor, weight: Packed, bias_N: Tensor | None = None) -> Tensor:
        dense = _dense(weight)
        if dense.rounds_inputs:
            q_TK, scale_TG = int8.round_inputs(x_TK)
            x_TK = int8.dequantize_groups(q_TK, scale_TG, self.dtype)
        return linear(x_TK, dense.data_NK, None if bias_N is None else bias_N.to(self.dtype))

    def rotate_and_store(
        self, qkv_TN: Tensor, attention: AttentionLayer, tables: StepTables, cache_B2JSD: Tensor
    ) -> Tensor:
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        qkv_TxD = qkv_TN.reshape(qkv_TN.shape[0], -1, attention.head_dim)
        q_THD, k_TJD, v_TJD = torch.split(qkv_TxD, [heads, kv_heads, kv_heads], dim=1)
        if attention.q_norm_D is not None and attention.k_norm_D is not None:
            q_THD = _rms_norm(q_THD, attention.q_norm_D, attention.norm_eps)
            k_TJD = _rms_norm(k_TJD, attention.k_norm_D, attention.norm_eps)
        if attention.rope is not None:
            q_THD = _rotate(q_THD, attention.rope, tables.positions_T)
            k_TJD = _rotate(k_TJD, attention.rope, tables.positions_T)
        fresh_T2JD = torch.stack((k_TJD, v_TJD), dim=1).to(cache_B2JSD.dtype)
        cache_B2JSD.permute(0, 3, 1, 2, 4)[tables.block_of_T, tables.slot_of_T] = fresh_T2JD
        return q_THD.contiguous()

    def attend(self, q_THD: Tensor, attention: AttentionLayer, tables: StepTables, cache_B2JSD: Tensor) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        for span in tables.spans:
            low = max(0, span.first_position + 1 - attention.window) if attention.window is not None else 0
            k_JCD, v_JCD = _read_cache(cache_B2JSD, tables, span, low)
            rows = slice(span.first_row, span.first_row + span.num_tokens)
            q_HtD = q_THD[rows].transpose(0, 1)
            mask_tC = _make_mask(span, low, attention.window, q_THD.device)
            k_JCD, v_JCD = k_JCD.to(q_THD.dtype), v_JCD.to(q_THD.dtype)
            if attention.softcap is None and attention.sinks_H is None:
                out_HtD = _attend_plain(q_HtD, k_JCD, v_JCD, attention.scale, mask_tC)
            else:
                out_HtD = _attend_general(q_HtD, k_JCD, v_JCD, attention, mask_tC)
            out_THD[rows] = out_HtD.transpose(0, 1)
        return out_THD.flatten(1)

    def activate(self, gate_up_TN: Tensor, activation: Activation) -> Tensor:
        gate_TI, up_TI = gate_up_TN.chunk(2, dim=1)
        match activation:
            case "silu":
                return silu(gate_TI) * up_TI
            case "gelu_tanh":
                return gelu(gate_TI, approximate="tanh") * up_TI
            case "swiglu_clamp":
                gate_TI = gate_TI.clamp(max=CLAMP_LIMIT)
                up_TI = up_TI.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
                return (up_TI + 1) * gate_TI * torch.sigmoid(gate_TI * CLAMP_ALPHA)

    def dense_mlp(self, x_TM: Tensor, mlp: DenseMLP) -> Tensor:
        return run_dense_mlp(self, x_TM, mlp)

    def experts(self, x_TM: Tensor, mlp: RoutedMLP) -> Tensor:
        return run_experts(self, x_TM, mlp)

    def head(self, x_RM: Tensor, weight: Packed, softcap: float | None) -> Tensor:
        logits_RV = self.linear(x_RM, weight)
        if softcap is not None:
            logits_RV = softcap * torch.tanh(logits_RV / softcap)
        return logits_RV if self.dtype == torch.float64 else logits_RV.float()

    def make_step(self, model: DecoderWeights) -> None:
        return None


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[N, K]`, the grid's values: exact in float64, and in float32 rounded once per operation."""
    match weight:
        case DenseWeight():
            return weight.data_NK.to(dtype)
        case Int8Weight():
            return int8.dequantize_rows(weight.q_NK, weight.scale_N, dtype)
        case Q8Weight():
            return int8.dequantize_groups(weight.q_NK, weight.scale_NG, dtype)
        case Q4Weight():
            return int4.dequantize_groups(weight.q_NP, weight.scale_NG, weight.min_NG, dtype)


def _dense(weight: Packed) -> ReferenceWeight:
    assert isinstance(weight, ReferenceWeight), f"{type(weight).__name__} was packed by another backend"
    return weight


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _rotate(x_TnD: Tensor, rope: RopeTable, positions_T: Tensor) -> Tensor:
    cos_T1R = rope.cos_LR[positions_T][:, None].to(x_TnD.dtype)
    sin_T1R = rope.sin_LR[positions_T][:, None].to(x_TnD.dtype)
    half = cos_T1R.shape[2]
    left, right, rest = torch.split(x_TnD, [half, half, x_TnD.shape[2] - 2 * half], dim=2)
    return torch.cat((left * cos_T1R - right * sin_T1R, right * cos_T1R + left * sin_T1R, rest), dim=2)


def _read_cache(cache_B2JSD: Tensor, tables: StepTables, span: Span, low: int) -> tuple[Tensor, Tensor]:
    """K and V of the span's tokens from position `low` on, each `[J, C - low, D]`."""
    block_tokens = cache_B2JSD.shape[3]
    skipped = low // block_tokens
    blocks = tables.table_X[span.first_entry + skipped : span.first_entry + span.num_blocks]
    cached_2JCD = cache_B2JSD[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
    start = skipped * block_tokens
    k_JCD, v_JCD = cached_2JCD[:, :, low - start : span.context - start]
    return k_JCD, v_JCD


def _make_mask(span: Span, low: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[t, C - low]`, true where a token looks; None where all look everywhere."""
    if span.num_tokens == 1:
        return None
    query_t1 = torch.arange(span.first_position, span.context, device=device)[:, None]
    key_C = torch.arange(low, span.context, device=device)[None]
    mask_tC = key_C <= query_t1
    return mask_tC if window is None else mask_tC & (key_C > query_t1 - window)


def _attend_plain(q_HtD: Tensor, k_JCD: Tensor, v_JCD: Tensor, scale: float, mask_tC: Tensor | None) -> Tensor:
    kv_heads = k_JCD.shape[0]
    if q_HtD.shape[1] == 1:  # the query heads of a KV head stand as rows of one small matrix: K is read once
        q_JGD = q_HtD.reshape(kv_heads, -1, q_HtD.shape[2])
        out_1JGD = scaled_dot_product_attention(q_JGD[None], k_JCD[None], v_JCD[None], scale=scale)
        return out_1JGD.reshape(q_HtD.shape)
    q_JGtD = q_HtD.reshape(kv_heads, -1, *q_HtD.shape[1:])
    groups = q_JGtD.shape[1]
    k_JGCD, v_JGCD = (x[:, None].expand(-1, groups, -1, -1) for x in (k_JCD, v_JCD))
    return scaled_dot_product_attention(q_JGtD, k_JGCD, v_JGCD, attn_mask=mask_tC, scale=scale).flatten(0, 1)


def _attend_general(
    q_HtD: Tensor, k_JCD: Tensor, v_JCD: Tensor, attention: AttentionLayer, mask_tC: Tensor | None
) -> Tensor:
    q_JGtD = q_HtD.reshape(k_JCD.shape[0], -1, *q_HtD.shape[1:])
    score_JGtC = q_JGtD @ k_JCD[:, None].transpose(2, 3) * attention.scale
    if attention.softcap is not None:
        score_JGtC = attention.softcap * torch.tanh(score_JGtC / attention.softcap)
    if mask_tC is not None:
        score_JGtC = score_JGtC.masked_fill(~mask_tC, -torch.inf)
    if attention.sinks_H is None:
        share_JGtC = torch.softmax(score_JGtC, dim=-1)
    else:
        sink_JG11 = attention.sinks_H.to(score_JGtC.dtype).reshape(*score_JGtC.shape[:2], 1, 1)
        sink_JGt1 = sink_JG11.expand(-1, -1, score_JGtC.shape[2], 1)
        share_JGtC = torch.softmax(torch.cat((score_JGtC, sink_JGt1), dim=-1), dim=-1)[..., :-1]
    return (share_JGtC @ v_JCD[:, None]).flatten(0, 1)
