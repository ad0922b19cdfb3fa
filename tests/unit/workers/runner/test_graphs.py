import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import NULL_BLOCK
from workers.engine.plan import Chunk, StepPlan
from workers.protocol import SamplingParams, StreamKey
from workers.runner.graphs import (
    DecodeInputs,
    Size,
    choose_size,
    fill_numbers,
    plan_row_counts,
    plan_widths,
)


def chunk(number: int, position: int, blocks: tuple[int, ...], token: int = 7, **changes) -> Chunk:
    given = {
        "key": StreamKey(bytes([number]) * 16, 0), "tokens": (token,), "first_position": position, "tables": (blocks,),
        "sampling": SamplingParams(), "output_position": 0, "explain": False, "is_prompt": False,
    }  # fmt: skip
    return Chunk(**(given | changes))


@pytest.mark.parametrize(
    ("max_running", "counts"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (17, (1, 2, 4, 8, 16, 17)),
        (64, (1, 2, 4, 8, 16, 32, 48, 64)),
    ],
)
def test_row_counts(max_running: int, counts: tuple[int, ...]) -> None:
    assert plan_row_counts(max_running) == counts


@given(max_running=st.integers(1, 1000), rows=st.integers(1, 1000))
def test_every_step_fits_and_padding_is_bounded(max_running: int, rows: int) -> None:
    counts = plan_row_counts(max_running)
    assert list(counts) == sorted(set(counts))
    plan = StepPlan(tuple(chunk(n % 256, 0, (0,)) for n in range(rows)))
    size = choose_size(plan, counts, (1,), 16)
    assert (size is None) == (rows > max_running)
    if size is not None:
        assert rows <= size.num_rows < max(2 * rows, rows + 16)


def test_widths() -> None:
    assert plan_widths(100, moves_whole_tables=False) == (100,)
    assert plan_widths(100, moves_whole_tables=True) == (4, 8, 16, 32, 64, 100)
    assert plan_widths(2, moves_whole_tables=True) == (2,)


def test_what_is_not_a_decode_step_runs_op_by_op() -> None:
    decode = chunk(1, 20, (3, 4))
    counts, widths = (1, 2, 4), (2, 4)
    assert choose_size(StepPlan((decode,)), counts, widths, 16) == Size(1, 2)
    assert choose_size(StepPlan((decode, chunk(2, 32, (5, 6, 7)), decode)), counts, widths, 16) == Size(4, 4)
    for other in (
        chunk(2, 0, (5,), is_prompt=True),
        chunk(2, 0, (5,), tokens=(1, 2)),
        chunk(2, 5, (5,), sampling=None),
        chunk(2, 64, (1, 2, 3, 4, 5)),
    ):
        assert choose_size(StepPlan((decode, other)), counts, widths, 16) is None
    assert choose_size(StepPlan(()), counts, widths, 16) is None


def test_padding_writes_into_the_scratch_block() -> None:
    plan = StepPlan((chunk(1, 20, (3, 4, 9), token=11), chunk(2, 0, (6,), token=12)))
    numbers = fill_numbers(plan, Size(4, 3), 16, scratch_block=99)
    assert numbers.rows_3N.tolist() == [[11, 12, 0, 0], [20, 0, 0, 0], [4, 0, 0, 0]]
    assert numbers.blocks_GN.tolist() == [[4, 6, 99, 99]]
    assert numbers.contexts_N.tolist() == [21, 1, 1, 1]
    assert numbers.tables_GNW.tolist() == [[[3, 4, 99], [6, 99, 99], [99, 99, 99], [99, 99, 99]]]


def test_each_state_group_has_its_table() -> None:
    """A window has let go of the first page: an entry that is never seen, whatever it says."""
    plan = StepPlan((chunk(1, 20, (), tables=((3, 4), (NULL_BLOCK, 8))),))
    numbers = fill_numbers(plan, Size(2, 2), 16, scratch_block=99)
    assert numbers.blocks_GN.tolist() == [[4, 99], [8, 99]]
    assert numbers.tables_GNW.tolist() == [[[3, 4], [99, 99]], [[99, 8], [99, 99]]]
    inputs = DecodeInputs(Size(2, 2), 2, torch.device("cpu"))
    inputs.set(numbers)
    first, second = inputs.tables
    assert first.table_NW.tolist() == [[3, 4], [99, 99]]
    assert second.table_NW.tolist() == [[99, 8], [99, 99]]
    assert first.block_of_T.tolist() == [4, 99]
    assert second.block_of_T.tolist() == [8, 99]
    assert first.context_N is second.context_N


def test_inputs_keep_their_place() -> None:
    inputs = DecodeInputs(Size(2, 3), 1, torch.device("cpu"))
    (tables,) = inputs.tables
    places = [tensor.data_ptr() for tensor in (inputs.ids_N, tables.positions_T, tables.table_NW, tables.context_N)]
    inputs.set(fill_numbers(StepPlan((chunk(1, 20, (3, 4), token=11),)), Size(2, 3), 16, 5))
    assert places == [t.data_ptr() for t in (inputs.ids_N, tables.positions_T, tables.table_NW, tables.context_N)]
    assert inputs.ids_N.tolist() == [11, 0]
    assert tables.positions_T.tolist() == [20, 0]
    assert tables.block_of_T.tolist() == [4, 5]
    assert tables.slot_of_T.tolist() == [4, 0]
    assert np.array_equal(tables.table_NW.numpy(), [[3, 4, 5], [5, 5, 5]])
    assert tables.context_N.tolist() == [21, 1]
