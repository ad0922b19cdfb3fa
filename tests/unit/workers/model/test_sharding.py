import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import ModelRefused
from workers.model import sharding
from workers.model.sharding import Shard, check_shard, check_tp_plan, cut, plan_heads
from workers.ops.weights import GROUP


def test_groups_are_those_of_the_grids() -> None:
    assert sharding.GROUP == GROUP


@given(count=st.integers(1, 300), num_ranks=st.integers(1, 40))
def test_every_item_has_exactly_one_rank(count: int, num_ranks: int) -> None:
    parts = [cut(rank, num_ranks, count) for rank in range(num_ranks)]
    assert list(itertools.chain.from_iterable(parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_all_heads_of_all_group_sizes() -> None:
    """Each query head is computed once, beside the KV head that it reads."""
    for kv_heads, per_kv_head in itertools.product(range(1, 17), range(1, 9)):
        for num_ranks in range(1, min(16, kv_heads * per_kv_head) + 1):
            heads = [plan_heads(kv_heads * per_kv_head, kv_heads, rank, num_ranks) for rank in range(num_ranks)]
            assert [h for each in heads for h in each.query] == list(range(kv_heads * per_kv_head))
            for each in heads:
                assert each.query
                assert len(each.query) % len(each.kv) == 0
                for local, head in enumerate(each.query):
                    kv_head = each.kv[local // (len(each.query) // len(each.kv))]
                    assert kv_head == head // per_kv_head


@given(size=st.integers(1, 5000), num_ranks=st.integers(1, 16))
def test_inner_columns_keep_groups_whole(size: int, num_ranks: int) -> None:
    parts = [Shard(rank, num_ranks).inner(size) for rank in range(num_ranks)]
    assert [edge for part in parts for edge in part] == list(range(size))
    if size % GROUP == 0 and size >= GROUP * num_ranks:
        assert all(part.start % GROUP == 0 and part.stop % GROUP == 0 for part in parts)


def test_a_group_that_is_too_large_is_refused() -> None:
    check_shard(Shard(5, 6), 6, (64,))
    with pytest.raises(ModelRefused, match="7 ranks cannot share 6 heads and 64 MLP columns: at most 6"):
        check_shard(Shard(0, 7), 6, (64,))
    with pytest.raises(ValueError, match="rank 2 of 2 does not exist"):
        Shard(2, 2)


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "gpt_oss"]
)
def test_transformers_splits_our_families_as_we_do(kind: str) -> None:
    from transformers import AutoConfig

    check_tp_plan(AutoConfig.for_model(kind).base_model_tp_plan)


def test_another_split_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"splits layers\.\*\.self_attn\.o_proj as 'colwise'"):
        check_tp_plan({"layers.*.self_attn.o_proj": "colwise"})
    with pytest.raises(ModelRefused, match="kv_a_proj_with_mqa as 'mla_kv_a_proj'"):
        check_tp_plan({"layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj"})
