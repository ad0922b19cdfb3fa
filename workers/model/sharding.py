"""Which part of a model each rank of a tensor-parallel group holds. Pure; no torch.

    by rows     q, k, v (whole heads), gate, up (and every expert's), embedding and head (by vocabulary): no sum needed
    by columns  o, down (and every expert's): the ranks' products are added
    whole       norms, router, rope; biases of o and down at rank 0 alone, because the ranks' products are added

Transformers says the same in `base_model_tp_plan`; `check_tp_plan` holds us to it. What it leaves out (gpt-oss names
only the embedding) follows the table above.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kv_transfer.reshard import owned_heads
from workers.errors import ModelRefused

GROUP = 32
"""Inputs that share a scale in a quantized matrix."""

_BY_ROWS = {"colwise", "packed_colwise", "local_colwise", "local_packed_colwise", "colwise_gather_output"}
"""Transformers names the split of a transposed matrix: its columns are the rows here."""
_BY_COLUMNS = {"rowwise", "local_rowwise"}
_WHOLE = {"replicated_with_grad_allreduce", "sequence_parallel", "replicate"}
_STYLES = {
    "q_proj": _BY_ROWS, "k_proj": _BY_ROWS, "v_proj": _BY_ROWS, "o_proj": _BY_COLUMNS, "q_norm": _WHOLE,
    "k_norm": _WHOLE, "gate_proj": _BY_ROWS, "up_proj": _BY_ROWS, "gate_up_proj": _BY_ROWS, "down_proj": _BY_COLUMNS,
    "experts": {"moe_tp_experts"}, "embed_tokens": {"embedding_rowwise"}, "lm_head": _BY_ROWS,
}  # fmt: skip


def cut(rank: int, num_ranks: int, count: int) -> range:
    """The items of `count` that a rank alone holds: equal parts within one, empty ones where there are more ranks."""
    return range(rank * count // num_ranks, (rank + 1) * count // num_ranks)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one rank; query head h of it reads its KV head h // (query heads / KV heads)."""

    query: range
    kv: range


def plan_heads(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> Heads:
    """Whole KV heads with all their query heads; where ranks share a KV head they cut its query heads among them."""
    per_kv_head = num_heads // num_kv_heads
    kv = owned_heads(rank, num_ranks, num_kv_heads)
    if num_ranks <= num_kv_heads:
        return Heads(range(kv.start * per_kv_head, kv.stop * per_kv_head), kv)
    holders = [other for other in range(num_ranks) if owned_heads(other, num_ranks, num_kv_heads) == kv]
    part = cut(rank - holders[0], len(holders), per_kv_head)
    first = kv.start * per_kv_head
    return Heads(range(first + part.start, first + part.stop), kv)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a group."""

    rank: int = 0
    num_ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} of {self.num_ranks} does not exist")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def heads(self, num_heads: int, num_kv_heads: int) -> Heads:
        return plan_heads(num_heads, num_kv_heads, self.rank, self.num_ranks)

    def inner(self, size: int) -> range:
        """Of an MLP's intermediate numbers: in whole groups where the size has them, so that a quantized matrix keeps
        its grid.
        """
        unit = GROUP if size % GROUP == 0 and size // GROUP >= self.num_ranks else 1
        part = cut(self.rank, self.num_ranks, size // unit)
        return range(part.start * unit, part.stop * unit)

    def vocabulary(self, size: int) -> range:
        return cut(self.rank, self.num_ranks, size)


WHOLE = Shard()


def check_shard(shard: Shard, num_heads: int, intermediate_sizes: tuple[int, ...]) -> None:
    """Raises `ModelRefused` where some rank would hold nothing of a layer."""
    smallest = min(num_heads, *intermediate_sizes)
    if shard.num_ranks > smallest:
        raise ModelRefused(
            f"{shard.num_ranks} ranks cannot share {num_heads} heads and {min(intermediate_sizes)} MLP columns: at most"
            f" {smallest}"
        )


def check_tp_plan(tp_plan: Mapping[str, str]) -> None:
    """Raises `ModelRefused` where transformers splits a module of the model otherwise than this file does."""
    for name, style in tp_plan.items():
        known = _STYLES.get(name.rsplit(".", 1)[-1])
        if known is None or style not in known:
            raise ModelRefused(f"transformers splits {name} as {style!r} among ranks, which is not done here")
