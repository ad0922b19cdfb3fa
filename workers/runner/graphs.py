"""Decode steps as recorded graphs: one launch replays a whole forward pass, one graph per size of step.

A step qualifies when every chunk is one token that is sampled; it runs in the smallest recorded size that holds it, the
rows beyond it computing a token in a block that belongs to nobody. What is recorded reads its numbers from tensors that
keep their place. All but `CudaCapture` runs on any device: the tests record by calling.

Shapes: N rows of a size, W block table entries of a size, V vocabulary.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kv_transfer.layout import NULL_BLOCK
from workers.engine.plan import StepPlan, ignore_layer
from workers.model.paged_attention import StepFacts
from workers.ops.base import DecodeTables
from workers.runner.kv_cache import PagedKVCache

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Records a call that reads and writes tensors in place; the result computes it again and returns the same tensor."""
DOUBLING_TO = 16
"""Sizes double up to here and go in steps of it beyond: at most 15 rows of a larger step are padding."""
PAD_TOKEN = 0


class Size(NamedTuple):
    """What a graph is recorded for."""

    num_rows: int
    width: int
    """Entries of each block table."""


def plan_row_counts(max_running: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, 48, ... and `max_running` last."""
    counts = [1 << power for power in range(DOUBLING_TO.bit_length()) if 1 << power < max_running]
    counts += range(2 * DOUBLING_TO, max_running, DOUBLING_TO)
    return (*counts, max_running)


def plan_widths(max_blocks: int, moves_whole_tables: bool) -> tuple[int, ...]:
    """Powers of two and `max_blocks` where attention moves a whole table whatever the context; otherwise one width."""
    if not moves_whole_tables:
        return (max_blocks,)
    return (*(1 << power for power in range(2, 31) if 1 << power < max_blocks), max_blocks)


def choose_size(plan: StepPlan, row_counts: Sequence[int], widths: Sequence[int], block_tokens: int) -> Size | None:
    """The smallest size that holds the step; None where it runs op by op."""
    chunks = plan.chunks
    if not chunks or len(chunks) > row_counts[-1]:
        return None
    if any(chunk.is_prompt or len(chunk.tokens) != 1 or chunk.sampling is None for chunk in chunks):
        return None
    longest = max(chunk.first_position // block_tokens + 1 for chunk in chunks)
    if longest > widths[-1]:
        return None
    return Size(row_counts[bisect_left(row_counts, len(chunks))], widths[bisect_left(widths, longest)])


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A step as the host knows it, in the order of `DecodeInputs`; G state groups."""

    rows_3N: npt.NDArray[np.int64]
    """Token ids, positions, slots."""
    blocks_GN: npt.NDArray[np.int64]
    contexts_N: npt.NDArray[np.int32]
    tables_GNW: npt.NDArray[np.int32]


def fill_numbers(plan: StepPlan, size: Size, block_tokens: int, scratch_block: int) -> StepNumbers:
    """The numbers of a step that `choose_size` lets through. Padding: token 0 at position 0 of the scratch block."""
    num_groups = len(plan.chunks[0].tables)
    rows_3N = np.zeros((3, size.num_rows), np.int64)
    rows_3N[0] = PAD_TOKEN
    blocks_GN = np.full((num_groups, size.num_rows), scratch_block, np.int64)
    contexts_N = np.ones(size.num_rows, np.int32)
    tables_GNW = np.full((num_groups, *size), scratch_block, np.int32)
    for row, chunk in enumerate(plan.chunks):
        position = chunk.first_position
        entry = position // block_tokens
        rows_3N[:, row] = chunk.tokens[0], position, position % block_tokens
        contexts_N[row] = position + 1
        for group, table in enumerate(chunk.tables):
            blocks_GN[group, row] = table[entry]
            tables_GNW[group, row, : entry + 1] = table[: entry + 1]
    tables_GNW[tables_GNW == NULL_BLOCK] = scratch_block  # what a window slid past is never seen: any block does
    return StepNumbers(rows_3N, blocks_GN, contexts_N, tables_GNW)


class DecodeInputs:
    """The tensors that one size of graph reads; they never move."""

    def __init__(self, size: Size, num_groups: int, device: torch.device) -> None:
        self._rows_3N = torch.zeros((3, size.num_rows), dtype=torch.int64, device=device)
        self._blocks_GN = torch.zeros((num_groups, size.num_rows), dtype=torch.int64, device=device)
        self._contexts_N = torch.ones(size.num_rows, dtype=torch.int32, device=device)
        self._tables_GNW = torch.zeros((num_groups, *size), dtype=torch.int32, device=device)
        self.ids_N, positions_N, slot_of_N = self._rows_3N.unbind()
        self.row_N = torch.arange(size.num_rows, device=device)
        empty_X = torch.empty(0, dtype=torch.int64, device=device)
        self.tables = tuple(
            DecodeTables(positions_N, block_of_N, slot_of_N, empty_X, (), table_NW, self._contexts_N)
            for block_of_N, table_NW in zip(self._blocks_GN, self._tables_GNW, strict=True)
        )
        """One per state group."""

    def set(self, numbers: StepNumbers) -> None:
        for place, values in (
            (self._rows_3N, numbers.rows_3N),
            (self._blocks_GN, numbers.blocks_GN),
            (self._contexts_N, numbers.contexts_N),
            (self._tables_GNW, numbers.tables_GNW),
        ):
            place.copy_(torch.from_numpy(values))


class GraphModel(Protocol):
    """What computes a step of one token per request: `model/decoder.py`."""

    def run(self, ids_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor: ...


class GraphOps(Protocol):
    """What a backend whose steps are recorded adds to `Ops`."""

    def moves_whole_tables(self, dtype: torch.dtype) -> bool:
        """Whether attention over a cache of `dtype` takes longer with a wider table, whatever the contexts."""
        ...

    def begin_replay(self, tables: DecodeTables, contexts: list[int], block_tokens: int) -> None:
        """Called before a step of `tables` runs, recorded or not, once its numbers are in place."""
        ...


class DecodeGraphs:
    """Records each size when it is first needed. Owned by the engine thread."""

    def __init__(
        self, model: GraphModel, ops: GraphOps, cache: PagedKVCache, max_running: int, max_context_tokens: int,
        capture: Capture,
    ) -> None:  # fmt: skip
        """`cache` has a scratch block."""
        assert cache.scratch_block is not None, "padding rows write somewhere"
        self._model, self._ops, self._cache, self._capture = model, ops, cache, capture
        self._scratch_block = cache.scratch_block
        max_blocks = cache.layout.num_blocks(max_context_tokens)
        self.row_counts = plan_row_counts(max_running)
        self.widths = plan_widths(max_blocks, ops.moves_whole_tables(cache.data.dtype))
        self._recorded: dict[Size, tuple[DecodeInputs, Callable[[], Tensor]]] = {}

    def run(self, plan: StepPlan, sampled: Sequence[int], on_layer: Callable[[int], None]) -> Tensor | None:
        """As `WholeSteps.run`; a graph replays as one, and layers are told after it. Logits are valid until the next
        run.
        """
        block_tokens = self._cache.layout.block_tokens
        size = choose_size(plan, self.row_counts, self.widths, block_tokens)
        if size is None:
            return None
        numbers = fill_numbers(plan, size, block_tokens, self._scratch_block)
        known = self._recorded.get(size)
        inputs = known[0] if known is not None else self._make_inputs(size)
        inputs.set(numbers)
        contexts = numbers.contexts_N.tolist()
        for tables in inputs.tables:
            self._ops.begin_replay(tables, contexts, block_tokens)
        if known is None:
            known = (inputs, self._capture(lambda: self._compute(inputs)))
            self._recorded[size] = known
        logits_NV = known[1]()
        for layer in range(self._cache.layout.num_layers):
            on_layer(layer)
        return logits_NV[: len(plan.chunks)]

    def _make_inputs(self, size: Size) -> DecodeInputs:
        return DecodeInputs(size, len(self._cache.layout.layer_groups), self._cache.data.device)

    def _compute(self, inputs: DecodeInputs) -> Tensor:
        facts = StepFacts(self._cache.data, inputs.tables, self._cache.layout.places, ignore_layer)
        return self._model.run(inputs.ids_N, inputs.row_N, facts)


class CudaCapture:
    """A `Capture` by CUDA graphs, all in one memory pool: graphs replay one after the other and share their scratch.

    The call runs twice before it is recorded, so that libraries have chosen and loaded what they use.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    @torch.inference_mode()
    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch declares no types for it
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Lane threads may call CUDA meanwhile; that is none of this recording's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_NV = compute()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits_NV

        return replay
