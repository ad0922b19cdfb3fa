"""Attention over the paged cache on a GPU: gathered in plain torch, or by FlashInfer or flash-attn where they are
installed.

A kernel of another package is trusted only after `find_fault` has seen it agree with the gathered one on this device.
Both read the cache of a layer as it lies, `[B, 2, J, S, D]`. Shapes as in `base.py`; N requests of the step, W entries
of a block table, G = H / J, C gathered slots.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.errors import BackendUnavailable
from workers.ops.base import DecodeTables, Span, StepTables
from workers.ops.reference import ReferenceOps
from workers.ops.weights import AttentionLayer

HALVES = (torch.bfloat16, torch.float16)
TOLERANCE = 2e-2
"""By which a kernel of bfloat16 may differ from float32, of the largest output."""
FLASH_ATTN_2_BLOCK = 256
"""flash-attn 2 reads pages of a multiple of it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The requests of a step that run more than one token."""

    tables: StepTables
    rows_T: Tensor
    """Their rows of the flat batch."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A step as paged kernels read it: int32 on the device, made once per step."""

    table_NW: Tensor
    context_N: Tensor
    edges_N: Tensor
    """`[N + 1]`: where each request's rows start, and T."""
    spans: tuple[Span, ...]
    """Empty in a step that is recorded or replayed: one row per request."""
    max_tokens: int
    max_context: int
    single_N: Tensor | None
    """Requests of one token, where not all are; None: all are."""
    row_N: Tensor
    """First row of each request."""
    prompts: Prompts | None
    source: StepTables


def make_paged_batch(tables: StepTables, block_tokens: int) -> PagedBatch:
    device = tables.positions_T.device
    if isinstance(tables, DecodeTables):
        # Not a copy: what is recorded reads the step's own tensors, whose numbers change under it.
        assert tables.table_NW.dtype == tables.context_N.dtype == torch.int32
        num_rows, width = tables.table_NW.shape
        edges_N = torch.arange(num_rows + 1, device=device, dtype=torch.int32)
        return PagedBatch(
            tables.table_NW, tables.context_N, edges_N, (), 1, width * block_tokens, None, edges_N[:-1],
            None, tables,
        )  # fmt: skip
    spans = tables.spans
    width = max(span.num_blocks for span in spans)
    columns = [[min(column, span.num_blocks - 1) + span.first_entry for column in range(width)] for span in spans]
    numbers = [number for span in spans for number in (span.context, span.first_row)]
    context_N, row_N = torch.tensor(numbers, dtype=torch.int32).view(-1, 2).to(device).T
    end = spans[-1].first_row + spans[-1].num_tokens
    several = [span for span in spans if span.num_tokens > 1]
    single = [index for index, span in enumerate(spans) if span.num_tokens == 1]
    prompts = None
    if several:
        rows = [row for span in several for row in range(span.first_row, span.first_row + span.num_tokens)]
        of_them = StepTables(
            tables.positions_T, tables.block_of_T, tables.slot_of_T, tables.table_X, tuple(several)
        )  # fmt: skip
        prompts = Prompts(of_them, torch.tensor(rows, device=device))
    return PagedBatch(
        # What a window slid past has no block and is never seen: any block does.
        table_NW=tables.table_X[torch.tensor(columns).to(device)].clamp(min=0).int(),
        context_N=context_N.contiguous(),
        edges_N=torch.cat((row_N, row_N.new_tensor([end]))),
        spans=spans,
        max_tokens=max(span.num_tokens for span in spans),
        max_context=max(span.context for span in spans),
        single_N=torch.tensor(single, dtype=torch.int64, device=device) if several else None,
        row_N=row_N.contiguous(),
        prompts=prompts,
        source=tables,
    )


class PagedKernel(Protocol):
    """Attention of a whole step, prompts and single tokens, in one call."""

    name: str

    def refuses(self, attention: AttentionLayer, cache_B2JSD: Tensor) -> str | None:
        """None, or what this kernel lacks for the layer. Decided without the device."""
        ...

    def attend(self, q_THD: Tensor, attention: AttentionLayer, batch: PagedBatch, cache_B2JSD: Tensor) -> Tensor:
        """`[T, H, D]` float32, as `Ops.attend`."""
        ...

    def begin_replay(self, tables: DecodeTables, contexts: list[int], block_tokens: int) -> None:
        """Before a recorded step runs again over `tables`: plans on the host, if the kernel has any."""
        ...


class GatherAttention:
    """Plain torch, float32: all requests of one token at once from a gathered copy of their caches.

    It moves as many slots as the longest context of the batch has, for every request.
    """

    name = "gather + SDPA"

    def attend(self, q_THD: Tensor, attention: AttentionLayer, batch: PagedBatch, cache_B2JSD: Tensor) -> Tensor:
        """`[T, H, D]`; rows of prompts are left for their own path."""
        if batch.single_N is None:
            return attend_rows(q_THD, attention, batch.table_NW, batch.context_N, cache_B2JSD)
        out_THD = torch.empty_like(q_THD)
        if len(batch.single_N):
            row_N = batch.row_N[batch.single_N]
            table_NW, context_N = batch.table_NW[batch.single_N], batch.context_N[batch.single_N]
            out_THD[row_N] = attend_rows(q_THD[row_N], attention, table_NW, context_N, cache_B2JSD)
        return out_THD


def attend_rows(
    q_NHD: Tensor, attention: AttentionLayer, table_NW: Tensor, context_N: Tensor, cache_B2JSD: Tensor
) -> Tensor:
    """`[N, H, D]`: one token per request, the last of its context. Every shape is known without the numbers."""
    block_tokens = cache_B2JSD.shape[3]
    column_NW = torch.arange(table_NW.shape[1], device=q_NHD.device)[None]
    if attention.window is not None:  # only the blocks that a window can touch
        touched = min(table_NW.shape[1], (attention.window - 2) // block_tokens + 2)
        first_N1 = (context_N[:, None] - attention.window).clamp(min=0) // block_tokens
        column_NW = first_N1 + column_NW[:, :touched]
        table_NW = table_NW.gather(1, column_NW.clamp(max=table_NW.shape[1] - 1).long())
    slot_S = torch.arange(block_tokens, device=q_NHD.device)
    position_NC = (column_NW[..., None] * block_tokens + slot_S).flatten(1)
    seen_NC = position_NC < context_N[:, None]
    if attention.window is not None:
        seen_NC &= position_NC >= context_N[:, None] - attention.window
    gathered_NJ2CD = cache_B2JSD[table_NW].permute(0, 3, 2, 1, 4, 5).flatten(3, 4).to(q_NHD.dtype)
    gathered_NJ2CD = gathered_NJ2CD.masked_fill(~seen_NC[:, None, None, :, None], 0)  # an unwritten slot may hold NaN
    k_NJCD, v_NJCD = gathered_NJ2CD.unbind(2)
    q_NJGD = q_NHD.reshape(len(q_NHD), attention.num_kv_heads, -1, attention.head_dim)
    mask_N11C = seen_NC[:, None, None]
    if attention.softcap is None and attention.sinks_H is None:
        out_NJGD = scaled_dot_product_attention(q_NJGD, k_NJCD, v_NJCD, attn_mask=mask_N11C, scale=attention.scale)
        return out_NJGD.reshape(q_NHD.shape)
    score_NJGC = q_NJGD @ k_NJCD.mT * attention.scale
    if attention.softcap is not None:
        score_NJGC = attention.softcap * torch.tanh(score_NJGC / attention.softcap)
    score_NJGC = score_NJGC.masked_fill(~mask_N11C, -torch.inf)
    if attention.sinks_H is not None:
        sink_NJG1 = attention.sinks_H.to(q_NHD.dtype).view(1, attention.num_kv_heads, -1, 1)
        score_NJGC = torch.cat((score_NJGC, sink_NJG1.expand(len(q_NHD), -1, -1, -1)), dim=-1)
    share_NJGC = torch.softmax(score_NJGC, dim=-1)[..., : k_NJCD.shape[2]]
    return (share_NJGC @ v_NJCD).reshape(q_NHD.shape)


def find_fault(kernel: PagedKernel, attention: AttentionLayer, block_tokens: int, device: torch.device) -> str | None:
    """None where the kernel agrees with the gathered attention for this kind of layer, alone and among prompts, over a
    small bfloat16 cache; otherwise what went wrong. Takes milliseconds, or as long as the package compiles.
    """
    shape = (8, 2, attention.num_kv_heads, block_tokens, attention.head_dim)
    generator = torch.Generator().manual_seed(0)
    cache_B2JSD = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
    if (lack := kernel.refuses(attention, cache_B2JSD)) is not None:
        return lack
    try:
        for tables in _example_steps(block_tokens, device):
            q_THD = torch.randn(
                len(tables.positions_T), attention.num_heads, attention.head_dim, generator=generator
            ).to(device, torch.bfloat16).float()  # fmt: skip
            found_THD = kernel.attend(q_THD, attention, make_paged_batch(tables, block_tokens), cache_B2JSD)
            expected_TN = ReferenceOps(torch.float32, device).attend(q_THD, attention, tables, cache_B2JSD)
            error = float((found_THD.flatten(1) - expected_TN).abs().max() / expected_TN.abs().max())
            if not error <= TOLERANCE:
                return f"it differs by {error:.1e} of the largest output from gathered attention, limit {TOLERANCE:.0e}"
    except Exception as error:  # noqa: BLE001  # another package's code, and it may compile: whatever it says, we gather
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return None


def _example_steps(block_tokens: int, device: torch.device) -> Iterator[StepTables]:
    """Two requests of one token; then a prompt, one token and a chunk."""
    for chunks in (((block_tokens + 2, 1), (0, 1)), ((0, 3), (2 * block_tokens, 1), (block_tokens - 1, 5))):
        spans: list[Span] = []
        table: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        free = [5, 0, 7, 2, 6, 1, 3, 4]
        for first, count in chunks:
            own = [free.pop() for _ in range(-(-(first + count) // block_tokens))]
            spans.append(Span(len(positions), count, first, len(table), len(own)))
            positions += range(first, first + count)
            blocks += [own[position // block_tokens] for position in range(first, first + count)]
            table += own
        numbers = (torch.tensor(each, device=device) for each in (positions, blocks, table))
        positions_T, block_of_T, table_X = numbers
        yield StepTables(positions_T, block_of_T, positions_T % block_tokens, table_X, tuple(spans))


def refuses_plainly(attention: AttentionLayer, cache_B2JSD: Tensor) -> str | None:
    """What neither package's kernel does as it is called here."""
    if attention.sinks_H is not None:
        return "attention sinks"
    if cache_B2JSD.dtype not in HALVES:
        return f"a cache of {str(cache_B2JSD.dtype).removeprefix('torch.')}"
    return None


class FlashAttention:
    """flash-attn, 3 (any block size) or 2; both keep nothing on the host, so a captured graph replays as it is."""

    def __init__(self, block_tokens: int) -> None:
        """Raises `BackendUnavailable` where neither is installed that reads blocks of this size."""
        self._three, self._two = find_module("flash_attn_interface"), find_module("flash_attn")
        module = self._three or self._two
        if module is None:
            raise BackendUnavailable("flash-attn is not installed")
        if self._three is None and block_tokens % FLASH_ATTN_2_BLOCK:
            raise BackendUnavailable(f"flash-attn 2 reads blocks of {FLASH_ATTN_2_BLOCK} tokens, not of {block_tokens}")
        self.name = f"flash-attn {3 if self._three else 2}"

    def refuses(self, attention: AttentionLayer, cache_B2JSD: Tensor) -> str | None:
        if cache_B2JSD.shape[4] % 8 or cache_B2JSD.shape[4] > 256:
            return f"head_dim {cache_B2JSD.shape[4]}"
        return refuses_plainly(attention, cache_B2JSD)

    def attend(self, q_THD: Tensor, attention: AttentionLayer, batch: PagedBatch, cache_B2JSD: Tensor) -> Tensor:
        q_THD = q_THD.to(cache_B2JSD.dtype)
        k_BSJD, v_BSJD = cache_B2JSD[:, 0].transpose(1, 2), cache_B2JSD[:, 1].transpose(1, 2)
        shared: dict[str, Any] = {
            "softmax_scale": attention.scale,
            "causal": True,
            "window_size": (
                -1 if attention.window is None else attention.window - 1,
                -1 if attention.window is None else 0,
            ),
            "softcap": attention.softcap or 0.0,
        }
        if self._three is not None:
            out = self._three.flash_attn_with_kvcache(
                q_THD, k_BSJD, v_BSJD, cache_seqlens=batch.context_N, page_table=batch.table_NW,
                cu_seqlens_q=batch.edges_N, max_seqlen_q=batch.max_tokens, **shared,
            )  # fmt: skip
        elif batch.max_tokens == 1:
            out = self._two.flash_attn_with_kvcache(
                q_THD[:, None], k_BSJD, v_BSJD, cache_seqlens=batch.context_N, block_table=batch.table_NW, **shared
            )[:, 0]
        else:
            edges_N = torch.nn.functional.pad(batch.context_N.cumsum(0, dtype=torch.int32), (1, 0))
            out = self._two.flash_attn_varlen_func(
                q_THD, k_BSJD, v_BSJD, batch.edges_N, edges_N, batch.max_tokens, batch.max_context,
                block_table=batch.table_NW, **shared,
            )  # fmt: skip
        result: Tensor = out.float()
        return result

    def begin_replay(self, tables: DecodeTables, contexts: list[int], block_tokens: int) -> None:
        return


def find_module(name: str) -> Any:
    """The imported package, None where it is not installed or does not load."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None
