"""Every backend against the reference in float64: rope with cache write, and attention over the paged cache."""

import pytest
import torch

from tests.support.ops_cases import (
    assert_close,
    from_backend,
    make_layer,
    make_step,
    random_cache,
    random_rope,
    random_tensor,
    to_backend,
)
from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps

HEAD_DIMS = (64, 80, 96, 128, 256)
MIXED = ((0, 5), (37, 1), (12, 9), (63, 1), (64, 1), (0, 1), (31, 33))
"""(tokens before, tokens in the step): prompts, chunks and decodes; blocks partly filled, just full and just new."""
DTYPES = (torch.float32, torch.bfloat16)


def attend_both(
    ops: Ops, oracle: ReferenceOps, layer, chunks, block_tokens: int, dtype: torch.dtype, tolerance: float = 1e-5
) -> None:
    tables, num_blocks = make_step(chunks, block_tokens)
    cache = random_cache(tables, num_blocks, layer, block_tokens, dtype)
    q_THD = random_tensor(len(tables.positions_T), layer.num_heads, layer.head_dim, scale=2.0)
    found_TN = ops.attend(q_THD, layer, tables, to_backend(ops, cache))
    assert found_TN.shape == (len(q_THD), layer.num_heads * layer.head_dim)
    assert_close(found_TN, oracle.attend(q_THD.double(), layer, tables, cache), tolerance)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(ops: Ops, oracle: ReferenceOps, head_dim: int, dtype: torch.dtype) -> None:
    attend_both(ops, oracle, make_layer(6, 2, head_dim), MIXED, 32, dtype)


@pytest.mark.parametrize("per_kv_head", range(1, 17))
def test_queries_per_kv_head(ops: Ops, oracle: ReferenceOps, per_kv_head: int) -> None:
    attend_both(ops, oracle, make_layer(2 * per_kv_head, 2, 64), MIXED, 16, torch.float32)


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 32, 128])
def test_block_sizes(ops: Ops, oracle: ReferenceOps, block_tokens: int) -> None:
    for dtype in DTYPES:
        attend_both(ops, oracle, make_layer(9, 3, 64), MIXED, block_tokens, dtype)


@pytest.mark.parametrize("window", [1, 2, 16, 31, 40, 1000])
def test_windows(ops: Ops, oracle: ReferenceOps, window: int) -> None:
    for sinks_H in (None, random_tensor(6)):
        layer = make_layer(6, 2, 64, window=window, sinks_H=sinks_H)
        attend_both(ops, oracle, layer, (*MIXED, (300, 1), (290, 50)), 16, torch.float32)


@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_and_softcap(ops: Ops, oracle: ReferenceOps, softcap, has_sinks: bool, window) -> None:
    layer = make_layer(
        8, 2, 80, softcap=softcap, window=window, scale=0.3, sinks_H=random_tensor(8, scale=3.0) if has_sinks else None
    )
    attend_both(ops, oracle, layer, MIXED, 32, torch.bfloat16)


@pytest.mark.parametrize("chunks", [[(4000, 1)], [(0, 1500)], [(2000, 600)], [(1000, 1)] * 16, [(7, 1)] * 200])
def test_long_contexts_and_many_requests(ops: Ops, oracle: ReferenceOps, chunks) -> None:
    attend_both(ops, oracle, make_layer(3, 1, 64), chunks, 32, torch.bfloat16)


def test_scores_far_apart_do_not_overflow(ops: Ops, oracle: ReferenceOps) -> None:
    """Scores of a thousand: float32 keeps four digits of their exponentials."""
    attend_both(ops, oracle, make_layer(4, 4, 64, scale=40.0), MIXED, 32, torch.float32, tolerance=1e-3)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [0, 0.5, 1])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_and_store(
    ops: Ops, oracle: ReferenceOps, head_dim: int, dtype: torch.dtype, rotated: float, has_norms: bool
) -> None:
    norms = {"q_norm_D": random_tensor(head_dim, seed=1), "k_norm_D": random_tensor(head_dim, seed=2)}
    pairs = int(head_dim * rotated) // 2
    layer = make_layer(
        6, 2, head_dim, rope=random_rope(pairs, 128) if pairs else None, norm_eps=1e-5, **(norms if has_norms else {})
    )
    tables, num_blocks = make_step(MIXED, 16)
    cache = random_cache(tables, num_blocks, layer, 16, dtype)
    qkv_TN = random_tensor(len(tables.positions_T), 10 * head_dim)
    before = qkv_TN.clone()
    own = to_backend(ops, cache)
    q_THD = ops.rotate_and_store(qkv_TN, layer, tables, own)
    expected = cache.double()
    assert_close(q_THD, oracle.rotate_and_store(qkv_TN.double(), layer, tables, expected), 3e-6)
    assert q_THD.is_contiguous()
    assert torch.equal(qkv_TN, before)
    found = from_backend(ops, own)
    written = torch.zeros_like(cache, dtype=torch.bool)
    written.permute(0, 3, 1, 2, 4)[tables.block_of_T, tables.slot_of_T] = True
    numbers = expected[written]
    rounding = 2**-8 * numbers.abs() if dtype == torch.bfloat16 else 0.0
    assert_close(found[written], numbers, 1.0, rounding + 3e-6 * numbers.abs().amax())
    assert torch.equal(found[~written].view(torch.uint8), cache[~written].view(torch.uint8)), "a slot of others changed"


def test_values_round_to_nearest_even(ops: Ops) -> None:
    """bf16 V in the cache is what torch's conversion gives, bit for bit."""
    layer = make_layer(2, 2, 64)
    tables, num_blocks = make_step([(0, 40)], 32)
    cache = to_backend(ops, random_cache(tables, num_blocks, layer, 32, torch.bfloat16))
    qkv_TN = random_tensor(40, 6 * 64)
    ops.rotate_and_store(qkv_TN, layer, tables, cache)
    v_TJD = qkv_TN[:, 4 * 64 :].reshape(40, 2, 64).bfloat16()
    stored = from_backend(ops, cache).permute(0, 3, 1, 2, 4)[tables.block_of_T, tables.slot_of_T]
    assert torch.equal(stored[:, 1], v_TJD)
    assert torch.equal(stored[:, 0], qkv_TN[:, 2 * 64 : 4 * 64].reshape(40, 2, 64).bfloat16())
