"""A step plan as tensors: rows, slots, block tables, and attention over them against a dense reference."""

import pytest
import torch

from kv_transfer.layout import NULL_BLOCK, KVLayout, LayerGroup
from workers.engine.plan import Chunk, StepPlan
from workers.model.paged_attention import attend, write_kv
from workers.ops.base import Span
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch
from workers.runner.kv_cache import PagedKVCache
from workers.sampling.sampler import Draw

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


def make_chunk(name: int, tokens: tuple[int, ...], first: int, blocks: tuple[int, ...], is_last: bool = True) -> Chunk:
    sampling = SamplingParams(seed=name) if is_last else None
    return Chunk(StreamKey(bytes([name]) * 16, 1), tokens, first, (blocks,), sampling, 3, False, False)


@pytest.fixture
def cache() -> PagedKVCache:
    return PagedKVCache(KVLayout(2, KV_HEADS, DIM, BLOCK, "fp32"), 12)


def test_rows_slots_and_draws(cache: PagedKVCache) -> None:
    plan = StepPlan((make_chunk(1, (50,), 5, (7, 2, 9)), make_chunk(2, (60, 61, 62), 3, (4, 1), is_last=False),
                     make_chunk(3, (70, 71), 0, (3,))))  # fmt: skip
    batch = make_batch(plan, cache, lambda layer: None)
    assert batch.ids_T.tolist() == [50, 60, 61, 62, 70, 71]
    assert batch.positions_T.tolist() == [5, 3, 4, 5, 0, 1]
    (tables,) = batch.facts.tables
    assert tables.block_of_T.tolist() == [2, 4, 1, 1, 3, 3]
    assert tables.slot_of_T.tolist() == [1, 3, 0, 1, 0, 1]
    assert tables.table_X.tolist() == [7, 2, 4, 1, 3]
    assert batch.rows_R.tolist() == [0, 5]
    assert batch.sampled_chunks == (0, 2)
    assert batch.draws == (Draw(SamplingParams(seed=1), 3), Draw(SamplingParams(seed=3), 3))
    assert tables.spans == (Span(0, 1, 5, 0, 2), Span(1, 3, 3, 2, 2), Span(4, 2, 0, 4, 1))
    assert not batch.facts.rows, "only what gathers rows pays for them"


def test_each_group_has_its_tables() -> None:
    groups = (LayerGroup((0, 2)), LayerGroup((1,), 3))
    cache = PagedKVCache(KVLayout(3, KV_HEADS, DIM, BLOCK, "fp32", groups=groups), 12)
    assert cache.data.shape == (2, 12, 2, KV_HEADS, BLOCK, DIM)
    chunk = Chunk(StreamKey(bytes(16), 1), (50, 51), 9, ((7, 2, 9), (NULL_BLOCK, 4, 5)), None, 0, False, True)
    facts = make_batch(StepPlan((chunk,)), cache, lambda layer: None).facts
    assert facts.places == ((0, 0), (1, 0), (0, 1))
    assert [tables.block_of_T.tolist() for tables in facts.tables] == [[9, 9], [5, 5]]
    assert [tables.table_X.tolist() for tables in facts.tables] == [[7, 2, 9], [-1, 4, 5]]


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("splits", [(11,), (4, 7), (1,) * 11, (5, 1, 1, 4)])
def test_attention_equals_a_dense_one(cache: PagedKVCache, splits: tuple[int, ...], window: int | None) -> None:
    torch.manual_seed(0)
    lengths, tables = (11, 6), ((8, 3, 5), (1, 10))
    dense = [torch.randn(HEADS + 2 * KV_HEADS, n, DIM) for n in lengths]
    seen: list[int] = []
    outs: list[list[torch.Tensor]] = [[], []]
    first = [0, 0]
    for count in splits:
        counts = [count, min(count, lengths[1] - first[1])]
        live = [i for i in (0, 1) if counts[i]]
        plan = StepPlan(tuple(make_chunk(i + 1, (0,) * counts[i], first[i], tables[i]) for i in live))
        facts = make_batch(plan, cache, seen.append).facts
        qkv = torch.cat([dense[i][:, first[i] : first[i] + counts[i]] for i in live], dim=1)
        write_kv(facts, 1, qkv[HEADS : HEADS + KV_HEADS], qkv[HEADS + KV_HEADS :])
        out = attend(facts, 1, qkv[:HEADS], 0.3, window).split([counts[i] for i in live])
        for i, part in zip(live, out, strict=True):
            outs[i].append(part)
            first[i] += counts[i]
    assert seen == [1] * len(splits)
    for i in (0, 1):
        torch.testing.assert_close(torch.cat(outs[i]), dense_attention(dense[i], window), atol=2e-6, rtol=1e-5)
    assert not cache.data[0].any(), "the other layer is untouched"


def dense_attention(qkv: torch.Tensor, window: int | None) -> torch.Tensor:
    query, rest = qkv[:HEADS].double(), qkv[HEADS:].double()
    key, value = rest[:KV_HEADS].repeat_interleave(3, 0), rest[KV_HEADS:].repeat_interleave(3, 0)
    scores = query @ key.transpose(1, 2) * 0.3
    distance = torch.arange(qkv.shape[1])[:, None] - torch.arange(qkv.shape[1])
    hidden = (distance < 0) | (distance >= (window or 10**6))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1).float()


def test_a_bf16_cache_rounds_keys_and_values_only(cache: PagedKVCache) -> None:
    rounded = PagedKVCache(KVLayout(2, KV_HEADS, DIM, BLOCK, "bf16"), 12)
    qkv = torch.randn(HEADS + 2 * KV_HEADS, 5, DIM)
    outs = []
    for one in (cache, rounded):
        facts = make_batch(StepPlan((make_chunk(1, (0,) * 5, 0, (2, 4)),)), one, lambda layer: None).facts
        write_kv(facts, 0, qkv[HEADS : HEADS + KV_HEADS], qkv[HEADS + KV_HEADS :])
        outs.append(attend(facts, 0, qkv[:HEADS], 0.3))
    assert outs[1].dtype == torch.float32
    torch.testing.assert_close(outs[0], outs[1], atol=2e-2, rtol=2e-2)
    assert not torch.equal(outs[0], outs[1])
