"""Paged attention by FlashInfer, whose HND layout of a cache is ours. Knows its plan-then-run interface.

A plan is made on the host for each step and kind of layer. A step that is recorded has wrappers with buffers of their
own, planned again before each replay; the recorded kernels read what the plan has put there.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.errors import BackendUnavailable
from workers.ops.base import DecodeTables, StepTables
from workers.ops.cuda_attention import PagedBatch, find_module, refuses_plainly
from workers.ops.weights import AttentionLayer

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends."""
HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a plan depends on beside the step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    block_tokens: int
    dtype: torch.dtype


@dataclass(slots=True)
class Planned:
    """A wrapper and the step that it is planned for."""

    wrapper: Any
    source: StepTables | None = None


class FlashInferAttention:
    """Implements `PagedKernel`."""

    def __init__(self, device: torch.device) -> None:
        """Raises `BackendUnavailable` where it is not installed."""
        self._module = find_module("flashinfer")
        if self._module is None:
            raise BackendUnavailable("flashinfer is not installed")
        self.name = f"FlashInfer {getattr(self._module, '__version__', '')}".strip()
        self._device = device
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._eager: dict[Kind, Planned] = {}
        self._recorded: dict[tuple[int, Kind], Planned] = {}
        """By the place of the step's block tables."""
        self._contexts: dict[int, list[int]] = {}

    def refuses(self, attention: AttentionLayer, cache_B2JSD: Tensor) -> str | None:
        if attention.head_dim not in HEAD_DIMS:
            return f"head_dim {attention.head_dim}"
        return refuses_plainly(attention, cache_B2JSD)

    def attend(self, q_THD: Tensor, attention: AttentionLayer, batch: PagedBatch, cache_B2JSD: Tensor) -> Tensor:
        kind = Kind(
            attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale, attention.window,
            attention.softcap, cache_B2JSD.shape[3], cache_B2JSD.dtype,
        )  # fmt: skip
        if isinstance(batch.source, DecodeTables):
            planned = self._recorded_for(batch.source, kind)
        else:
            planned = self._eager_for(batch, kind)
        out_THD: Tensor = planned.wrapper.run(q_THD.to(cache_B2JSD.dtype), cache_B2JSD)
        return out_THD.float()

    def begin_replay(self, tables: DecodeTables, contexts: list[int], block_tokens: int) -> None:
        place = tables.table_NW.data_ptr()
        self._contexts[place] = contexts
        for (of, kind), planned in self._recorded.items():
            if of == place:
                self._plan_rows(planned, tables, contexts, kind)

    def _eager_for(self, batch: PagedBatch, kind: Kind) -> Planned:
        if kind not in self._eager:
            self._eager[kind] = Planned(self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND"))
        planned = self._eager[kind]
        if planned.source is not batch.source:
            counts = [span.num_blocks for span in batch.spans]
            contexts = [span.context for span in batch.spans]
            edges_N = torch.tensor([*(span.first_row for span in batch.spans), len(batch.source.positions_T)])
            planned.wrapper.plan(
                qo_indptr=edges_N.int(), paged_kv_indptr=_edges(counts),
                paged_kv_indices=_entries(batch.table_NW, counts), head_dim_qk=kind.head_dim, causal=True,
                paged_kv_last_page_len=_last_pages(contexts, kind.block_tokens), **_arguments(kind),
            )  # fmt: skip
            planned.source = batch.source
        return planned

    def _recorded_for(self, tables: DecodeTables, kind: Kind) -> Planned:
        """Made while the step runs for the first time, before it is recorded."""
        place = tables.table_NW.data_ptr()
        if (place, kind) not in self._recorded:
            rows, width = tables.table_NW.shape
            edges_N, pages_X, last_N = (
                torch.zeros(size, dtype=torch.int32, device=self._device) for size in (rows + 1, rows * width, rows)
            )
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=edges_N,
                paged_kv_indices_buffer=pages_X, paged_kv_last_page_len_buffer=last_N,
            )  # fmt: skip
            self._recorded[place, kind] = Planned(wrapper)
            self._plan_rows(self._recorded[place, kind], tables, self._contexts[place], kind)
        return self._recorded[place, kind]

    def _plan_rows(self, planned: Planned, tables: DecodeTables, contexts: list[int], kind: Kind) -> None:
        counts = [-(-context // kind.block_tokens) for context in contexts]
        planned.wrapper.plan(
            indptr=_edges(counts), indices=_entries(tables.table_NW, counts), head_dim=kind.head_dim,
            last_page_len=_last_pages(contexts, kind.block_tokens), **_arguments(kind),
        )  # fmt: skip


def _arguments(kind: Kind) -> dict[str, Any]:
    """What both plans take."""
    return {
        "num_qo_heads": kind.num_heads,
        "num_kv_heads": kind.num_kv_heads,
        "page_size": kind.block_tokens,
        "sm_scale": kind.scale,
        "window_left": -1 if kind.window is None else kind.window - 1,
        "logits_soft_cap": kind.softcap,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.dtype,
    }


def _edges(counts: list[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0)).int()


def _last_pages(contexts: list[int], block_tokens: int) -> Tensor:
    """Tokens in the last block of each context, 1 to block_tokens."""
    return torch.tensor([(context - 1) % block_tokens + 1 for context in contexts], dtype=torch.int32)


def _entries(table_NW: Tensor, counts: list[int]) -> Tensor:
    """The used entries of each row, one row after the other."""
    width = table_NW.shape[1]
    places = [row * width + column for row, count in enumerate(counts) for column in range(count)]
    return table_NW.flatten()[torch.tensor(places).to(table_NW.device)]
