"""flash-attn and FlashInfer as their documentation describes the calls that we make, in plain torch on any device.

They hold our side of the bargain: layouts, block tables, inclusive windows, causality aligned to the end of a context.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def attend_one(q_tHD: Tensor, k_CJD: Tensor, v_CJD: Tensor, scale: float, left: int, softcap: float | None) -> Tensor:
    """The last t tokens of a context; each sees `left` tokens before itself, all where it is negative."""
    context, num_tokens = len(k_CJD), len(q_tHD)
    groups = q_tHD.shape[1] // k_CJD.shape[1]
    k_HCD, v_HCD = (x.repeat_interleave(groups, dim=1).transpose(0, 1).double() for x in (k_CJD, v_CJD))
    score_HtC = q_tHD.transpose(0, 1).double() @ k_HCD.mT * scale
    if softcap:
        score_HtC = softcap * torch.tanh(score_HtC / softcap)
    query_t1 = torch.arange(context - num_tokens, context)[:, None]
    key_C = torch.arange(context)
    seen_tC = key_C <= query_t1
    if left >= 0:
        seen_tC &= key_C >= query_t1 - left
    share_HtC = torch.softmax(score_HtC.masked_fill(~seen_tC, -torch.inf), dim=-1)
    return (share_HtC @ v_HCD).transpose(0, 1).to(q_tHD.dtype)


def flash_attn_3() -> SimpleNamespace:
    """`flash_attn_interface`: pages of any size, `[pages, tokens, KV heads, head_dim]`."""

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
        cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float,
    ) -> Tensor:  # fmt: skip
        assert causal
        for numbers in (cache_seqlens, page_table, cu_seqlens_q):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        assert q.dtype == k_cache.dtype
        out = torch.empty_like(q)
        for row, context in enumerate(cache_seqlens.tolist()):
            tokens = slice(int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1]))
            k, v = (cache[page_table[row]].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
            assert window_size[1] == (0 if window_size[0] >= 0 else -1)
            out[tokens] = attend_one(q[tokens], k, v, softmax_scale, window_size[0], softcap)
        return out

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


def flash_attn_2() -> SimpleNamespace:
    """`flash_attn`: pages of a multiple of 256 tokens; one call for single tokens and one for the rest."""

    def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, edges: Tensor, contexts: Tensor, table: Tensor, **rest: Any):
        assert k_cache.shape[1] % 256 == 0
        return flash_attn_3().flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=contexts, page_table=table, cu_seqlens_q=edges,
            max_seqlen_q=len(q), **rest,
        )  # fmt: skip

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, **rest: Any) -> Tensor:
        assert q.shape[1] == 1
        edges = torch.arange(len(q) + 1, dtype=torch.int32)
        return run(q[:, 0], k_cache, v_cache, edges, cache_seqlens, block_table, **rest)[:, None]

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *, block_table, **rest: Any):
        contexts = cu_seqlens_k.diff()
        assert int(contexts.max()) <= max_k
        assert int(cu_seqlens_q.diff().max()) <= max_q
        return run(q, k, v, cu_seqlens_q, contexts, block_table, **rest)

    return SimpleNamespace(
        flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func
    )


class Wrapper:
    """Either wrapper of FlashInfer: what `plan` was given is all that `run` knows of the step."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
        assert kv_layout == "HND"
        self.fixed_rows = len(buffers["paged_kv_last_page_len_buffer"]) if use_cuda_graph else None
        self.indices_limit = len(buffers["paged_kv_indices_buffer"]) if use_cuda_graph else None
        self.num_plans = 0

    def plan(self, **planned: Any) -> None:
        self.num_plans += 1
        self.planned = planned
        if self.fixed_rows is not None:
            assert len(planned["last_page_len"]) == self.fixed_rows
            assert len(planned["indices"]) <= (self.indices_limit or 0)

    def run(self, q: Tensor, cache: Tensor) -> Tensor:
        plan = self.planned
        assert (plan["q_data_type"], plan["kv_data_type"]) == (q.dtype, cache.dtype)
        assert q.shape[1:] == (plan["num_qo_heads"], plan.get("head_dim", plan.get("head_dim_qk")))
        assert cache.shape[2:4] == (plan["num_kv_heads"], plan["page_size"])
        edges = plan.get("indptr", plan.get("paged_kv_indptr"))
        pages = plan.get("indices", plan.get("paged_kv_indices"))
        last = plan.get("last_page_len", plan.get("paged_kv_last_page_len"))
        rows = plan.get("qo_indptr", torch.arange(len(last) + 1, dtype=torch.int32))
        assert {each.dtype for each in (edges, pages, last, rows)} == {torch.int32}
        out = torch.empty_like(q)
        for row in range(len(last)):
            own = pages[edges[row] : edges[row + 1]]
            context = (len(own) - 1) * cache.shape[3] + int(last[row])
            k, v = (cache[own, half].transpose(1, 2).flatten(0, 1)[:context] for half in (0, 1))
            tokens = slice(int(rows[row]), int(rows[row + 1]))
            out[tokens] = attend_one(q[tokens], k, v, plan["sm_scale"], plan["window_left"], plan["logits_soft_cap"])
        return out


def flashinfer() -> SimpleNamespace:
    return SimpleNamespace(
        __version__="0.0", BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        BatchDecodeWithPagedKVCacheWrapper=lambda *args, use_tensor_cores, **rest: Wrapper(*args, **rest),
    )  # fmt: skip
