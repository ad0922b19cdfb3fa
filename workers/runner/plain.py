"""Steps of a plan in one call of a backend that takes plain numbers. Makes no tensor but the logits."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from workers.engine.plan import StepPlan
from workers.ops.base import PlainTables
from workers.runner.batch import make_plain_batch
from workers.runner.kv_cache import PagedKVCache


class PlainStep(Protocol):
    """`ops/native.py` has one."""

    def run_plain(
        self, ids: list[int], rows: list[int], tables: PlainTables, data: Tensor, on_layer: Callable[[int], None]
    ) -> Tensor:
        """As `Step.run`."""
        ...


class PlainSteps:
    """A `WholeSteps` for a model whose layers are one state group."""

    def __init__(self, step: PlainStep, cache: PagedKVCache) -> None:
        assert len(cache.layout.layer_groups) == 1
        self._step, self._cache = step, cache

    def run(self, plan: StepPlan, sampled: Sequence[int], on_layer: Callable[[int], None]) -> Tensor:
        batch = make_plain_batch(plan, sampled, self._cache.layout)
        return self._step.run_plain(batch.ids, batch.rows, batch.tables[0], self._cache.data, on_layer)
