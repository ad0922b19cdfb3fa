import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import KVLayout, LayerGroup, make_model_digest, plan_units

SMOLLM = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=32, dtype="fp32")


def test_sizes_of_a_known_model():
    assert SMOLLM.bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert SMOLLM.block_bytes == 32 * SMOLLM.bytes_per_token
    assert SMOLLM.unit_bytes(64, 10) == 10 * 2 * 3 * 64 * 64 * 4
    assert [SMOLLM.num_blocks(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_block_size_and_dtype_may_differ_and_nothing_else():
    assert SMOLLM.incompatible_with(KVLayout(30, 3, 64, 16, "bf16")) is None
    for other in (KVLayout(29, 3, 64, 32, "fp32"), KVLayout(30, 4, 64, 32, "fp32"), KVLayout(30, 3, 128, 32, "fp32")):
        assert "against" in (SMOLLM.incompatible_with(other) or "")


MIXED = KVLayout(5, 2, 8, 4, "fp32", groups=(LayerGroup((0, 1), 6), LayerGroup((2, 4)), LayerGroup((3,), 6)))


def test_layers_have_places_in_the_blocks_of_their_group():
    assert MIXED.places == ((0, 0), (0, 1), (1, 0), (2, 0), (1, 1))
    assert MIXED.cache_shape(7) == (2, 7, 2, 2, 4, 8)
    assert MIXED.block_bytes == MIXED.unit_bytes(4, 2)
    assert SMOLLM.places == tuple((0, layer) for layer in range(30))
    assert SMOLLM.cache_shape(7) == (30, 7, 2, 3, 32, 64)


def test_other_groups_are_refused_by_name():
    same = KVLayout(5, 2, 8, 4, "bf16", "dim_major", MIXED.groups)
    assert MIXED.incompatible_with(same) is None
    assert MIXED.incompatible_with(KVLayout(5, 2, 8, 4, "fp32")) == "groups 2x6,2xall,1x6 against 5xall"
    bigger = KVLayout(5, 2, 8, 8, "fp32", groups=MIXED.groups)
    assert MIXED.incompatible_with(bigger) == "block_tokens 4 against 8, where layers have windows"
    one_window = KVLayout(5, 2, 8, 4, "fp32", groups=(LayerGroup(tuple(range(5)), 9),))
    assert one_window.incompatible_with(KVLayout(5, 2, 8, 4, "fp32")) == "groups 5x9 against 5xall"
    many = KVLayout(60, 2, 8, 4, "fp32", groups=tuple(LayerGroup((layer,), layer + 1) for layer in range(60)))
    assert len("layout: " + (many.incompatible_with(KVLayout(60, 2, 8, 4, "fp32")) or "")) <= 128


def test_the_digest_depends_on_every_fact_and_not_on_their_order():
    facts = {"weights": "abc", "rope_theta": "10000", "quantization": "none"}
    digest = make_model_digest(facts)
    assert digest == make_model_digest(dict(reversed(facts.items())))
    for key in facts:
        assert digest != make_model_digest({**facts, key: facts[key] + "x"})
        assert digest != make_model_digest({k: v for k, v in facts.items() if k != key})
    assert make_model_digest({"a": "b,c"}) != make_model_digest({"a": "b", "c": ""})


def test_small_chunks_are_one_unit_and_large_ones_split_by_layers():
    assert plan_units(8, SMOLLM) == ((0, 30),)
    groups = plan_units(64, SMOLLM, min_unit_bytes=SMOLLM.unit_bytes(64, 7))
    assert groups == ((0, 7), (7, 8), (15, 7), (22, 8))
    assert plan_units(2048, SMOLLM) == tuple((layer, 1) for layer in range(30))


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 1 << 23))
def test_groups_cover_every_layer_once_and_none_is_too_small(num_tokens: int, num_layers: int, min_bytes: int):
    layout = KVLayout(num_layers, 2, 32, 16, "bf16")
    groups = plan_units(num_tokens, layout, min_bytes)
    assert [layer for first, count in groups for layer in range(first, first + count)] == list(range(num_layers))
    sizes = {count for _, count in groups}
    assert max(sizes) - min(sizes) <= 1
    if len(groups) > 1:
        assert all(layout.unit_bytes(num_tokens, count) >= min_bytes for _, count in groups)


def test_an_empty_chunk_is_a_programming_error():
    with pytest.raises(AssertionError):
        plan_units(0, SMOLLM)
