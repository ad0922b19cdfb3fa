"""The op set on an NVIDIA GPU: cuBLAS for matrices, torch for rows, paged attention by `cuda_attention.py`.

Activations are float32 as everywhere; a bfloat16 matrix runs on tensor cores, with inputs rounded to bfloat16 and
float32 sums. Quantized matrices are dequantized once, at load, to float32: exact on their grid, and no memory is saved,
so bfloat16 is the mode for a GPU. Nothing here waits for the device while a graph is captured.

The class runs on any torch device: the contract suite holds these paths against the reference on a CPU. Shapes as in
`base.py`; k = top_k, E experts.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, rms_norm

from workers.ops.base import DecodeTables, StepTables
from workers.ops.cuda_attention import HALVES, GatherAttention, PagedBatch, PagedKernel, find_fault, make_paged_batch
from workers.ops.mlp import run_experts
from workers.ops.reference import ReferenceOps, dequantize
from workers.ops.weights import AttentionLayer, DecoderWeights, DenseMLP, DenseWeight, Packed, RoutedMLP, Weight
from workers.quantization import int8

logger = logging.getLogger(__name__)

ALL_EXPERTS_TOKENS = 64
"""Up to so many tokens every expert computes all of them: most experts are visited anyway and nothing is sorted."""


@dataclass(slots=True)
class CudaWeight:
    """float32, bfloat16 or float16, on the device. An expert's is a part of one tensor once stacked."""

    data_NK: Tensor
    rounds_inputs: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.data_NK.shape[0], self.data_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.data_NK.nbytes


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts of a layer in one tensor per matrix."""

    mlp: RoutedMLP
    gate_up_ENK: Tensor
    down_EMI: Tensor
    gate_up_bias_EN: Tensor | None
    down_bias_EM: Tensor | None


class CudaOps(ReferenceOps):
    """Implements `Ops`. `kernel` attends where it can; layers that it refuses are gathered."""

    name = "cuda"

    def __init__(
        self, device: torch.device | str = "cuda", kernel: PagedKernel | None = None, block_tokens: int = 16
    ) -> None:
        """`block_tokens`: of the cache, for the proof of the kernel in `make_step`."""
        super().__init__(torch.float32, device)
        self._kernel = kernel
        self._block_tokens = block_tokens
        self._faults: dict[tuple[Any, ...], str] = {}
        """Kinds of layers that the kernel has not been proven for, and why."""
        self._gather = GatherAttention()
        self._batch: tuple[StepTables, PagedBatch] | None = None
        self._recorded: dict[int, PagedBatch] = {}
        self._stacks: dict[int, StackedExperts] = {}
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def pack(self, weight: Weight) -> CudaWeight:  # type: ignore[override]  # a backend packs as it likes
        if isinstance(weight, DenseWeight) and weight.data_NK.dtype in (torch.bfloat16, torch.float16):
            return CudaWeight(weight.data_NK.to(self.device), rounds_inputs=False)
        return CudaWeight(dequantize(weight).to(self.device), not isinstance(weight, DenseWeight))

    def embed(self, ids_T: Tensor, table: Packed, scale: float) -> Tensor:
        return _own(table).data_NK[ids_T].float() * scale

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float, delta_TM: Tensor | None = None) -> Tensor:
        if delta_TM is not None:
            x_TM += delta_TM
        return rms_norm(x_TM, weight_M.shape, weight_M, eps)

    def linear(self, x_TK: Tensor, weight: Packed, bias_N: Tensor | None = None) -> Tensor:
        own = _own(weight)
        if own.data_NK.dtype == torch.float32:
            return linear(_round_inputs(x_TK) if own.rounds_inputs else x_TK, own.data_NK, bias_N)
        out_TN = _multiply(x_TK.to(own.data_NK.dtype), own.data_NK.T)
        return out_TN if bias_N is None else out_TN.add_(bias_N)

    def attend(self, q_THD: Tensor, attention: AttentionLayer, tables: StepTables, cache_B2JSD: Tensor) -> Tensor:
        batch = self._batch_of(tables, cache_B2JSD.shape[3])
        kernel = self._kernel
        if (
            kernel is not None
            and _kind_of(attention) not in self._faults
            and not kernel.refuses(attention, cache_B2JSD)
        ):
            return kernel.attend(q_THD, attention, batch, cache_B2JSD).flatten(1)
        out_THD = self._gather.attend(q_THD, attention, batch, cache_B2JSD)
        if batch.prompts is not None:  # their rows are still empty
            rows = batch.prompts.rows_T
            out_THD[rows] = super().attend(q_THD, attention, batch.prompts.tables, cache_B2JSD).view_as(q_THD)[rows]
        return out_THD.flatten(1)

    def _is_proven(self, kernel: PagedKernel, attention: AttentionLayer, cache_B2JSD: Tensor) -> bool:
        return _kind_of(attention) not in self._faults and kernel.refuses(attention, cache_B2JSD) is None

    def _batch_of(self, tables: StepTables, block_tokens: int) -> PagedBatch:
        """Made by the first layer of a step, used by all. Those of recorded steps stay: a graph reads their tensors."""
        if isinstance(tables, DecodeTables):
            if id(tables) not in self._recorded:
                self._recorded[id(tables)] = make_paged_batch(tables, block_tokens)
            return self._recorded[id(tables)]
        if self._batch is None or self._batch[0] is not tables:
            self._batch = (tables, make_paged_batch(tables, block_tokens))
        return self._batch[1]

    def moves_whole_tables(self, dtype: torch.dtype) -> bool:
        """Whether a wider block table costs time whatever the contexts: some layer of such a cache is gathered."""
        return self._kernel is None or bool(self._faults) or dtype not in HALVES

    def begin_replay(self, tables: DecodeTables, contexts: list[int], block_tokens: int) -> None:
        """Before a recorded step runs again: what the kernel plans on the host, from the contexts of all N rows."""
        if self._kernel is not None:
            self._kernel.begin_replay(tables, contexts, block_tokens)

    def experts(self, x_TM: Tensor, mlp: RoutedMLP) -> Tensor:
        stack = self._stacks.get(id(mlp)) or self._stack(mlp)
        is_capturing = x_TM.is_cuda and torch.cuda.is_current_stream_capturing()
        if len(x_TM) <= ALL_EXPERTS_TOKENS or (is_capturing and not can_group(stack)):
            return self._compute_all_experts(x_TM, stack)
        return self._compute_grouped_experts(x_TM, stack) if can_group(stack) else run_experts(self, x_TM, mlp)

    def _compute_all_experts(self, x_TM: Tensor, stack: StackedExperts) -> Tensor:
        """Every expert over every token; what a token does not visit has a share of 0."""
        share_Tk, expert_Tk = self._route(x_TM, stack.mlp)
        share_TE = x_TM.new_zeros(len(x_TM), len(stack.mlp.experts)).scatter_(1, expert_Tk, share_Tk)
        x_ETM = _inputs(x_TM, stack.mlp.experts[0].gate_up)[None].expand(share_TE.shape[1], -1, -1)
        hidden_ETN = _multiply(x_ETM, stack.gate_up_ENK.mT)
        if stack.gate_up_bias_EN is not None:
            hidden_ETN += stack.gate_up_bias_EN[:, None]
        experts, tokens, _ = hidden_ETN.shape
        active_XI = self.activate(hidden_ETN.flatten(0, 1), stack.mlp.experts[0].activation)
        active_ETI = _inputs(active_XI, stack.mlp.experts[0].down).view(experts, tokens, -1)
        out_ETM = _multiply(active_ETI, stack.down_EMI.mT)
        if stack.down_bias_EM is not None:
            out_ETM += stack.down_bias_EM[:, None]
        visited_ET1 = (share_TE > 0).T[..., None]  # a token that overflows an expert it does not visit is not hurt
        return (out_ETM.masked_fill_(~visited_ET1, 0) * share_TE.T[..., None]).sum(dim=0)

    def _compute_grouped_experts(self, x_TM: Tensor, stack: StackedExperts) -> Tensor:
        """Rows sorted by expert, one matrix product for all; no count leaves the device."""
        mlp = stack.mlp
        share_Tk, expert_Tk = self._route(x_TM, mlp)
        expert_X, order_X = expert_Tk.flatten().sort(stable=True)
        numbers_E = torch.arange(len(mlp.experts), device=x_TM.device)
        ends_E = torch.searchsorted(expert_X, numbers_E, right=True).int()
        x_XM = x_TM[order_X // mlp.top_k].to(stack.gate_up_ENK.dtype)
        hidden_XN = grouped_mm(x_XM, stack.gate_up_ENK.mT, offs=ends_E).float()
        if stack.gate_up_bias_EN is not None:
            hidden_XN += stack.gate_up_bias_EN[expert_X]
        active_XI = self.activate(hidden_XN, mlp.experts[0].activation).to(stack.down_EMI.dtype)
        out_XM = grouped_mm(active_XI, stack.down_EMI.mT, offs=ends_E).float()
        if stack.down_bias_EM is not None:
            out_XM += stack.down_bias_EM[expert_X]
        back_XM = torch.empty_like(out_XM)
        back_XM[order_X] = out_XM
        return (back_XM.view(*expert_Tk.shape, -1) * share_Tk[..., None]).sum(dim=1)

    def _route(self, x_TM: Tensor, mlp: RoutedMLP) -> tuple[Tensor, Tensor]:
        """(shares, experts), `[T, k]` each."""
        logits_TE = self.linear(x_TM, mlp.router, mlp.router_bias_E)
        share_Tk, expert_Tk = torch.softmax(logits_TE, dim=-1).topk(mlp.top_k, dim=-1)
        return (share_Tk / share_Tk.sum(dim=-1, keepdim=True) if mlp.renormalize else share_Tk), expert_Tk

    def _stack(self, mlp: RoutedMLP) -> StackedExperts:
        """The layer's experts in one tensor each; their own become parts of it, so no memory is held twice."""
        stack = StackedExperts(
            mlp,
            _stack_weights([expert.gate_up for expert in mlp.experts]),
            _stack_weights([expert.down for expert in mlp.experts]),
            _stack_vectors([expert.gate_up_bias_N for expert in mlp.experts]),
            _stack_vectors([expert.down_bias_M for expert in mlp.experts]),
        )
        self._stacks[id(mlp)] = stack
        return stack

    def make_step(self, model: DecoderWeights) -> None:
        """Stacks the experts layer by layer and proves the kernel; the step itself runs op by op."""
        kinds = {_kind_of(layer.attention): layer.attention for layer in model.layers}
        for kind, attention in kinds.items() if self._kernel is not None else ():
            assert self._kernel is not None
            fault = find_fault(self._kernel, attention, self._block_tokens, self.device)
            if fault is not None:
                self._faults[kind] = fault
                logger.warning("%d heads of %d are gathered, not by %s: %s", *kind[:2], self._kernel.name, fault)
        for layer in model.layers:
            if not isinstance(layer.mlp, DenseMLP):
                self._stack(layer.mlp)


def _kind_of(attention: AttentionLayer) -> tuple[Any, ...]:
    """All that a kernel sees of a layer beside its tensors."""
    sizes = (attention.num_heads, attention.head_dim, attention.num_kv_heads)
    return (*sizes, attention.window, attention.softcap, attention.scale, attention.sinks_H is not None)


def can_group(stack: StackedExperts) -> bool:
    """Whether grouped products run: bfloat16, rows of 16 bytes."""
    sizes = (*stack.gate_up_ENK.shape[1:], *stack.down_EMI.shape[1:])
    return stack.gate_up_ENK.dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def _own(weight: Packed) -> CudaWeight:
    assert isinstance(weight, CudaWeight), f"{type(weight).__name__} was packed by another backend"
    return weight


def _inputs(x_TK: Tensor, weight: Packed) -> Tensor:
    """x as a product with the weight takes it."""
    own = _own(weight)
    return _round_inputs(x_TK) if own.rounds_inputs else x_TK.to(own.data_NK.dtype)


def _round_inputs(x_TK: Tensor) -> Tensor:
    q_TK, scale_TG = int8.round_inputs(x_TK)
    return int8.dequantize_groups(q_TK, scale_TG, x_TK.dtype)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32 of two matrices, or two stacks of them, of equal dtype."""
    if left.dtype == torch.float32:
        return left @ right
    if not left.is_cuda:  # the CPU has no product with another output dtype
        return left.float() @ right.float()
    if left.dim() == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.bmm(left, right, out_dtype=torch.float32)


def _stack_weights(weights: list[Packed]) -> Tensor:
    stacked_ENK = torch.stack([_own(weight).data_NK for weight in weights])
    for weight, part_NK in zip(weights, stacked_ENK, strict=True):
        _own(weight).data_NK = part_NK
    return stacked_ENK


def _stack_vectors(vectors: list[Tensor | None]) -> Tensor | None:
    given = [vector for vector in vectors if vector is not None]
    return torch.stack(given) if given else None
