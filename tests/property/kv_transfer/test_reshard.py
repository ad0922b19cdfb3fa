"""The reshard plan by brute force: every number of KV heads and both TP degrees up to 16."""

import itertools
from collections import Counter

import pytest

from kv_transfer.layout import KVLayout, plan_units
from kv_transfer.reshard import HeadRun, owned_heads, plan_reshard

DEGREES = range(1, 17)


def heads_of(run: HeadRun, num_kv_heads: int, source_tp: int, target_tp: int) -> tuple[list[int], list[int]]:
    """The heads that a run reads and those that it writes, by their numbers in the model."""
    reads = owned_heads(run.source, source_tp, num_kv_heads)[run.source_offset :][: run.num_heads]
    writes = owned_heads(run.target, target_tp, num_kv_heads)[run.target_offset :][: run.num_heads]
    return list(reads), list(writes)


@pytest.mark.parametrize("num_kv_heads", DEGREES)
def test_each_decode_rank_and_head_is_written_exactly_once_with_its_own_content(num_kv_heads: int):
    for source_tp, target_tp in itertools.product(DEGREES, DEGREES):
        plan = plan_reshard(num_kv_heads, source_tp, target_tp)
        written: Counter[tuple[int, int]] = Counter()
        for run in plan.runs:
            reads, writes = heads_of(run, num_kv_heads, source_tp, target_tp)
            assert reads == writes
            assert len(writes) == run.num_heads > 0
            written.update((run.target, head) for head in writes)
        wanted = {(rank, head) for rank in range(target_tp) for head in owned_heads(rank, target_tp, num_kv_heads)}
        assert written.keys() == wanted
        assert set(written.values()) == {1}


@pytest.mark.parametrize("num_kv_heads", DEGREES)
def test_every_head_has_a_rank_and_every_rank_a_head(num_kv_heads: int):
    for tp in DEGREES:
        owned = [owned_heads(rank, tp, num_kv_heads) for rank in range(tp)]
        assert {head for heads in owned for head in heads} == set(range(num_kv_heads))
        assert all(len(heads) > 0 for heads in owned)
        if tp <= num_kv_heads:
            assert sum(len(heads) for heads in owned) == num_kv_heads, "nothing is held twice"
            assert max(len(heads) for heads in owned) - min(len(heads) for heads in owned) <= 1


@pytest.mark.parametrize("num_kv_heads", DEGREES)
def test_a_pair_of_ranks_has_one_run_at_most_and_replicas_share_the_work(num_kv_heads: int):
    for source_tp, target_tp in itertools.product(DEGREES, DEGREES):
        numbers = (num_kv_heads, source_tp, target_tp)
        plan = plan_reshard(*numbers)
        pairs = [(run.source, run.target) for run in plan.runs]
        assert len(set(pairs)) == len(pairs)
        assert plan.runs == tuple(sorted(plan.runs, key=lambda run: (run.target, run.source)))
        sent = Counter((run.source, head) for run in plan.runs for head in heads_of(run, *numbers)[0])
        for head in range(num_kv_heads):
            loads = [
                sent[rank, head] for rank in range(source_tp) if head in owned_heads(rank, source_tp, num_kv_heads)
            ]
            assert max(loads) - min(loads) <= 1, "one replica works while another is idle"


def test_equal_plans_and_no_others_have_equal_digests():
    plans = [plan_reshard(*numbers) for numbers in itertools.product((1, 2, 3, 8), (1, 2, 4), (1, 2, 4))]
    assert len({plan.digest for plan in plans}) == len(plans)
    before = plan_reshard(8, 4, 2).digest
    plan_reshard.cache_clear()
    assert plan_reshard(8, 4, 2).digest == before


def test_what_a_rank_sends_and_receives_is_the_plan_seen_from_it():
    plan = plan_reshard(2, 4, 8)
    assert {run for rank in range(4) for run in plan.runs_from(rank)} == set(plan.runs)
    assert {run for rank in range(8) for run in plan.runs_to(rank)} == set(plan.runs)
    assert plan_reshard(8, 16, 2).runs_from(1) == (), "a replica that was not chosen sends nothing"
    assert plan_reshard(10, 4, 1).runs == (
        HeadRun(0, 0, 0, 0, 2), HeadRun(1, 0, 0, 2, 3), HeadRun(2, 0, 0, 5, 2), HeadRun(3, 0, 0, 7, 3),
    )  # fmt: skip


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (4, 2), (3, 5), (16, 2), (2, 16)])
def test_the_units_of_a_lane_are_counted_from_its_own_heads(source_tp: int, target_tp: int):
    layout = KVLayout(num_layers=12, num_kv_heads=10, head_dim=64, block_tokens=16, dtype="bf16")
    plan, chunks = plan_reshard(10, source_tp, target_tp), (256, 256, 37)
    counts = plan.count_units(chunks, layout, 64 << 10)
    assert set(counts) == {(run.source, run.target) for run in plan.runs}
    for run in plan.runs:
        lane = KVLayout(12, run.num_heads, 64, 16, "bf16")
        units = [unit for chunk in chunks for unit in plan_units(chunk, lane, 64 << 10)]
        assert counts[run.source, run.target] == len(units)
        assert sum(num_layers for _, num_layers in units) == 12 * len(chunks)
