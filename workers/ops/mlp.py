"""MLPs composed of a backend's own linear and activation: what a backend without fused ones uses.

Shapes as in `base.py`; k = top_k.
"""

import torch
from torch import Tensor

from workers.ops.base import Ops
from workers.ops.weights import DenseMLP, RoutedMLP


def run_dense_mlp(ops: Ops, x_TM: Tensor, mlp: DenseMLP) -> Tensor:
    """As `Ops.dense_mlp`."""
    gate_up_TN = ops.linear(x_TM, mlp.gate_up, mlp.gate_up_bias_N)
    return ops.linear(ops.activate(gate_up_TN, mlp.activation), mlp.down, mlp.down_bias_M)


def run_experts(ops: Ops, x_TM: Tensor, mlp: RoutedMLP) -> Tensor:
    """As `Ops.experts`. A token's experts are added in the order of their numbers, whatever the batch."""
    logits_TE = ops.linear(x_TM, mlp.router, mlp.router_bias_E)
    share_Tk, expert_Tk = torch.softmax(logits_TE, dim=-1).topk(mlp.top_k, dim=-1)
    if mlp.renormalize:
        share_Tk = share_Tk / share_Tk.sum(dim=-1, keepdim=True)
    order = expert_Tk.flatten().argsort(stable=True)
    token_of = order // mlp.top_k
    share_of = share_Tk.flatten()[order]
    counts = torch.bincount(expert_Tk.flatten(), minlength=len(mlp.experts)).tolist()
    out_TM = torch.zeros_like(x_TM)
    start = 0
    for expert, count in zip(mlp.experts, counts, strict=True):
        if count:
            tokens, share = token_of[start : start + count], share_of[start : start + count]
            out_TM.index_add_(0, tokens, run_dense_mlp(ops, x_TM[tokens], expert) * share[:, None])
        start += count
    return out_TM
