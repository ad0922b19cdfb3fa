"""What the ranks of a tensor-parallel group do together in a forward pass, and a rank's place in the group.

Every rank calls the same collectives in the same order, because every rank runs the same plan. A lost rank raises in
the others; the group then ends as one.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from workers.model.sharding import Shard
from workers.ops.base import Ops
from workers.ops.weights import Packed


class Collective(Protocol):
    """One rank's end of its group. Used by the thread that computes."""

    def add(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape, equal on every rank to the last bit; x may be changed."""
        ...

    def gather(self, x_RV: Tensor) -> Tensor:
        """At rank 0 the ranks' columns side by side, in order; elsewhere x. Widths may differ by rank."""
        ...


@dataclass(frozen=True, slots=True)
class Parallel:
    """A rank, the rest of its group, and which rows of the vocabulary it holds."""

    shard: Shard
    collective: Collective
    vocabulary: range

    def embed(self, ops: Ops, ids_T: Tensor, table: Packed, scale: float) -> Tensor:
        """As `Ops.embed`: each token's row comes from the rank that holds it."""
        local_T = ids_T - self.vocabulary.start
        is_own_T = (local_T >= 0) & (local_T < len(self.vocabulary))
        x_TM = ops.embed(local_T.where(is_own_T, 0), table, scale)
        return self.collective.add(x_TM.masked_fill(~is_own_T[:, None], 0))
