"""Gather and scatter at any offset, between caches with different blocks and dtypes, against a token-by-token
reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout import NULL_BLOCK, KVLayout
from kv_transfer.staging import (
    StagingBuffers,
    as_bytes,
    as_unit,
    digest_of,
    gather_unit,
    scatter_unit,
    view_cache,
)

LAYERS, HEADS, DIM = 3, 2, 4


def make_cache(num_blocks: int, block_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (LAYERS, num_blocks, 2, HEADS, block_tokens, DIM)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)


def token_state(data: torch.Tensor, blocks: list[int], token: int) -> torch.Tensor:
    """`[layers, 2, heads, dim]` of one token, looked up the slow way."""
    block_tokens = data.shape[4]
    return data[:, blocks[token // block_tokens], :, :, token % block_tokens]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_moves_between_caches_of_different_block_sizes(draw):
    source_block, target_block = draw.draw(st.sampled_from([1, 3, 4, 16])), draw.draw(st.sampled_from([1, 2, 5, 16]))
    num_tokens = draw.draw(st.integers(1, 40))
    first_token = draw.draw(st.integers(0, num_tokens - 1))
    count = draw.draw(st.integers(1, num_tokens - first_token))
    first_layer = draw.draw(st.integers(0, LAYERS - 1))
    num_layers = draw.draw(st.integers(1, LAYERS - first_layer))
    source, target = make_cache(48, source_block), torch.full((LAYERS, 48, 2, HEADS, target_block, DIM), -1.0)
    source_table = draw.draw(st.permutations(range(48)))[: -(-num_tokens // source_block)]
    target_table = draw.draw(st.permutations(range(48)))[: -(-num_tokens // target_block)]

    unit = gather_unit(view_cache(source), [source_table], first_token, count, first_layer, num_layers)
    assert unit.is_contiguous()
    assert unit.shape == (num_layers, 2, HEADS, count, DIM)
    scatter_unit(view_cache(target), [target_table], unit, first_token, first_layer)

    layers = slice(first_layer, first_layer + num_layers)
    for token in range(first_token, first_token + count):
        assert torch.equal(
            token_state(target, target_table, token)[layers], token_state(source, source_table, token)[layers]
        )
    assert int((target != -1).sum()) == unit.numel(), "slots outside the unit are untouched"
    touched = view_cache(target).touched_blocks([target_table], first_token, count, first_layer, num_layers)
    untouched = [block for block in range(48) if block not in touched]
    assert bool((target[:, untouched] == -1).all())


@pytest.mark.parametrize(("ours", "theirs"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_units_travel_in_the_receivers_dtype(ours, theirs):
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    source = (make_cache(4, 4) / 7).to(dtypes[ours])
    target = torch.zeros((LAYERS, 4, 2, HEADS, 4, DIM), dtype=dtypes[theirs])
    unit = gather_unit(view_cache(source), [[3, 1]], 1, 6, 0, LAYERS, dtype=dtypes[theirs])
    layout = KVLayout(LAYERS, HEADS, DIM, 4, theirs)
    flat = as_bytes(unit)
    assert flat.numel() == layout.unit_bytes(6, LAYERS)
    scatter_unit(view_cache(target), [[0, 2]], as_unit(flat.clone(), layout, 6, LAYERS), 1, 0)
    for token in range(1, 7):
        assert torch.equal(token_state(target, [0, 2], token), token_state(source, [3, 1], token).to(dtypes[theirs]))


def test_the_digest_sees_any_flipped_bit():
    unit = as_bytes(gather_unit(view_cache(make_cache(2, 4)), [[0, 1]], 0, 8, 0, LAYERS))
    before = digest_of(unit)
    assert before == digest_of(unit.clone())
    for position in (0, 17, unit.numel() - 1):
        unit[position] ^= 1
        assert digest_of(unit) != before
        unit[position] ^= 1


def test_staging_buffers_are_reused_by_size_and_bounded():
    buffers = StagingBuffers(max_free=2)
    first = buffers.take(64)
    buffers.give(first)
    assert buffers.take(32) is not first
    assert buffers.take(64) is first
    assert buffers.take(64) is not first
    for size in (8, 16, 24):
        buffers.give(torch.empty(size, dtype=torch.uint8))
    assert len(buffers._free) == 2


@pytest.mark.parametrize(
    ("theirs", "ours"), [("token_major", "dim_major"), ("dim_major", "token_major"), ("dim_major",) * 2]
)
def test_units_move_between_orders_of_keys(theirs, ours):
    """The unit is the same whatever the order; K lies transposed inside its block, V does not."""
    source, target = make_cache(4, 4), torch.zeros((LAYERS, 4, 2, HEADS, 4, DIM))
    reference = gather_unit(view_cache(source), [[3, 1]], 1, 6, 0, LAYERS)
    stored = source.clone()
    if theirs == "dim_major":
        turned = source[:, :, 0].transpose(-1, -2).contiguous()
        stored[:, :, 0] = turned.view(source[:, :, 0].shape)
    unit = gather_unit(view_cache(stored, theirs), [[3, 1]], 1, 6, 0, LAYERS)
    assert unit.is_contiguous()
    assert torch.equal(unit, reference)
    scatter_unit(view_cache(target, ours), [[0, 2]], unit, 1, 0)
    assert torch.equal(gather_unit(view_cache(target, ours), [[0, 2]], 1, 6, 0, LAYERS), reference)
    assert torch.equal(target[:, :, 1], gather_values(target, reference)), "V is token-major in every order"
    assert int((target != 0).sum()) <= unit.numel(), "slots outside the unit are untouched"


def gather_values(target, unit):
    """Where V of tokens 1 to 6 must lie in blocks 0 and 2."""
    values = torch.zeros_like(target[:, :, 1])
    for token in range(1, 7):
        values[:, (0, 2)[token // 4], :, token % 4] = unit[:, 1, :, token - 1]
    return values


PLACES = ((0, 0), (1, 0), (0, 1))
"""Three layers: the first and the last share blocks, the middle one has a window."""


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_groups_have_tables_of_their_own_and_windows_leave_gaps(draw):
    """Where the sender slid on it sends zeros; where the receiver has no block nothing is written."""
    num_tokens, size = draw.draw(st.integers(1, 40)), draw.draw(st.sampled_from([1, 3, 4]))
    pages = -(-num_tokens // size)
    slid_there, slid_here = sorted((draw.draw(st.integers(0, pages)), draw.draw(st.integers(0, pages))))
    blocks = draw.draw(st.permutations(range(2 * pages)))
    source, target = make_cache(2 * pages, size)[:2], torch.full((2, 2 * pages, 2, HEADS, size, DIM), -1.0)
    theirs = [blocks[:pages], [NULL_BLOCK] * slid_there + blocks[pages + slid_there :]]
    ours = [blocks[pages:], [NULL_BLOCK] * slid_here + blocks[slid_here:pages]]
    first, first_layer = draw.draw(st.integers(0, num_tokens - 1)), draw.draw(st.integers(0, 2))
    count, num_layers = num_tokens - first, draw.draw(st.integers(1, 3 - first_layer))
    unit = gather_unit(view_cache(source, places=PLACES), theirs, first, count, first_layer, num_layers)
    view = view_cache(target, places=PLACES)
    scatter_unit(view, ours, unit, first, first_layer)
    written = 0
    for layer in range(first_layer, first_layer + num_layers):
        group, index = PLACES[layer]
        for token in range(first, num_tokens):
            page, slot = divmod(token, size)
            sent = unit[layer - first_layer, :, :, token - first]
            stored = source[index, theirs[group][page], :, :, slot]
            assert torch.equal(sent, torch.zeros_like(sent) if theirs[group][page] == NULL_BLOCK else stored)
            if ours[group][page] != NULL_BLOCK:
                assert torch.equal(target[index, ours[group][page], :, :, slot], stored), "the sender still has it"
                written += sent.numel()
    assert int((target != -1).sum()) == written
    groups = {PLACES[layer][0] for layer in range(first_layer, first_layer + num_layers)}
    touched = {block for group in groups for block in ours[group][first // size :]} - {NULL_BLOCK}
    assert set(view.touched_blocks(ours, first, count, first_layer, num_layers)) == touched
