"""A tensor-parallel group in one process: a thread per rank, collectives by shared slots and a barrier.

Stands in for processes over gloo where a test is about the arithmetic: sums are made in rank order, equal everywhere.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from workers.engine.plan import RunResult, StepPlan
from workers.model.arch import read_spec
from workers.model.build import WeightMode, load_decoder
from workers.model.collective import Parallel
from workers.model.decoder import Decoder
from workers.model.sharding import Shard
from workers.ops.base import Ops
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache, plan_layout
from workers.sampling.sampler import sample

T = TypeVar("T")
DEADLINE_S = 60.0


class Meeting:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, num_ranks: int) -> None:
        self.slots: list[Tensor] = [torch.empty(0)] * num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.num_sums = 0

    def exchange(self, rank: int, x: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        self.slots[rank] = x
        self.barrier.wait(DEADLINE_S)
        result = combine(self.slots)
        self.barrier.wait(DEADLINE_S)
        return result


class ThreadCollective:
    """Implements `Collective`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def add(self, x: Tensor) -> Tensor:
        self._meeting.num_sums += self._rank == 0
        return self._meeting.exchange(self._rank, x, lambda slots: torch.stack(list(slots)).sum(dim=0))

    def gather(self, x_RV: Tensor) -> Tensor:
        return self._meeting.exchange(
            self._rank, x_RV, lambda slots: torch.cat(list(slots), dim=1) if self._rank == 0 else x_RV
        )


class RankThreads:
    """The ranks of a model, each with its part of the weights and of the cache: `num_blocks` for each state group.
    Implements the engine's `Runner`.
    """

    def __init__(
        self, folder: Path, mode: WeightMode, make_ops: Callable[[], Ops], num_ranks: int, block_tokens: int,
        num_blocks: int,
    ) -> None:  # fmt: skip
        self.meeting = Meeting(num_ranks)
        self._pool = ThreadPoolExecutor(num_ranks)
        vocab = read_spec(folder).vocab_size
        self.decoders: list[Decoder] = []
        self.caches: list[PagedKVCache] = []
        for rank in range(num_ranks):
            shard = Shard(rank, num_ranks)
            parallel = Parallel(shard, ThreadCollective(self.meeting, rank), shard.vocabulary(vocab))
            decoder = load_decoder(folder, mode, make_ops(), parallel=parallel)
            whole = plan_layout(decoder.spec, decoder.state("fp32"), block_tokens, "fp32")
            layout = dataclasses.replace(whole, num_kv_heads=decoder.num_kv_heads)
            self.decoders.append(decoder)
            self.caches.append(PagedKVCache(layout, num_blocks * len(layout.layer_groups)))

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        batch = make_batch(plan, self.caches[0], on_layer)
        logits_RV = self.compute(plan, on_layer)[0]
        tokens: list[int | None] = [None] * len(plan.chunks)
        if batch.draws:
            for chunk, token in zip(batch.sampled_chunks, sample(logits_RV, batch.draws), strict=True):
                tokens[chunk] = token
        return RunResult(tokens, [None] * len(plan.chunks))

    def compute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> list[Tensor]:
        """What `forward` returned on each rank; every rank makes its own batch of the same plan."""

        def run(rank: int) -> Tensor:
            batch = make_batch(plan, self.caches[rank], on_layer if rank == 0 else lambda layer: None)
            return self.decoders[rank].forward(batch.ids_T, batch.positions_T, batch.rows_R, batch.facts)

        return [future.result(DEADLINE_S) for future in [self._pool.submit(run, r) for r in range(len(self.caches))]]

    def close(self) -> None:
        self._pool.shutdown()
