"""A backend's whole step equals its own ops one by one, and the reference in float64; it reports layers in order."""

from functools import partial

import pytest
import torch

from tests.support.ops_cases import (
    EXACT_GRIDS,
    allowed,
    assert_close,
    from_backend,
    make_step,
    random_cache,
    random_rope,
    random_tensor,
    random_weight,
    to_backend,
)
from tests.support.ops_cases import make_layer as make_attention
from workers.model.decoder import run_layers
from workers.model.paged_attention import StepFacts
from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps
from workers.ops.weights import DecoderLayer, DecoderWeights, DenseMLP

CHUNKS = ((0, 40), (37, 1), (12, 9), (63, 1), (64, 1), (0, 1))
VOCAB, WIDTH, SIZE, LAYERS = 301, 192, 256, 3


def make_model(ops: Ops, grid: str, heads: int = 6, kv_heads: int = 2, head_dim: int = 64) -> DecoderWeights:
    rope = random_rope(head_dim // 2, 128)
    head_grid = "q8" if grid == "q4" else grid

    def make_layer(seed: int) -> DecoderLayer:
        qkv, out = (heads + 2 * kv_heads) * head_dim, heads * head_dim
        return DecoderLayer(
            attention=make_attention(heads, kv_heads, head_dim, rope=rope),
            attention_norm_M=1 + random_tensor(WIDTH) / 9,
            qkv=ops.pack(random_weight(grid, qkv, WIDTH, seed)), qkv_bias_N=None,
            out=ops.pack(random_weight(grid, WIDTH, out, seed)), out_bias_M=None, after_attention_norm_M=None,
            mlp_norm_M=1 + random_tensor(WIDTH, seed=seed) / 9, after_mlp_norm_M=None,
            mlp=DenseMLP(
                gate_up=ops.pack(random_weight(grid, 2 * SIZE, WIDTH, seed)),
                down=ops.pack(random_weight(grid, WIDTH, SIZE, seed)), activation="silu",
            ),
        )  # fmt: skip

    head = ops.pack(random_weight(head_grid, VOCAB, WIDTH))
    return DecoderWeights(
        embedding=head, embedding_scale=1.0, layers=tuple(make_layer(i) for i in range(LAYERS)),
        norm_M=torch.ones(WIDTH), norm_eps=1e-5, head=head, softcap=None,
    )  # fmt: skip


def whole_step(ops: Ops, model: DecoderWeights):
    """`Step.run` of the backend; op by op where it has none."""
    step = ops.make_step(model)
    return partial(one_by_one, ops, model) if step is None else step.run


def one_by_one(ops: Ops, model: DecoderWeights, ids_T, rows_R, tables, data, on_layer) -> torch.Tensor:
    """All layers of one group."""
    places = tuple((0, layer) for layer in range(len(model.layers)))
    return run_layers(ops, model, ids_T, rows_R, StepFacts(data, (tables,), places, on_layer))


def make_case(ops: Ops, model: DecoderWeights, dtype: torch.dtype):
    tables, num_blocks = make_step(CHUNKS, 32)
    layers = [random_cache(tables, num_blocks, layer.attention, 32, dtype) for layer in model.layers]
    ids_T = torch.arange(len(tables.positions_T)) * 7 % VOCAB
    rows_R = torch.tensor([span.first_row + span.num_tokens - 1 for span in tables.spans])
    return ids_T, rows_R, tables, torch.stack([to_backend(ops, cache) for cache in layers])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", ["fp32", "bf16", "int8", "q4"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128), (2, 2, 80)])
def test_step(
    ops: Ops, oracle: ReferenceOps, grid: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    model = make_model(ops, grid, heads, kv_heads, head_dim)
    run = whole_step(ops, model)
    ids_T, rows_R, tables, data = make_case(ops, model, dtype)
    seen: list[int] = []
    once, again = data.clone(), data.clone()
    found_RV = run(ids_T, rows_R, tables, once, seen.append)
    assert seen == list(range(LAYERS))
    one_by_one_RV = one_by_one(ops, model, ids_T, rows_R, tables, again, lambda layer: None)
    assert_close(found_RV, one_by_one_RV, 2e-5 if grid in EXACT_GRIDS else 2e-2)
    exact = torch.stack([from_backend(ops, cache) for cache in data])
    exact = exact.double() if dtype == torch.float32 else exact
    reference = make_model(oracle, grid, heads, kv_heads, head_dim)
    expected_RV = one_by_one(oracle, reference, ids_T, rows_R, tables, exact, lambda layer: None)
    is_exact = dtype == torch.float32 and grid in EXACT_GRIDS
    assert_close(found_RV, expected_RV, allowed(ops, grid, 1e-5) if is_exact else 3e-2)
    assert run(ids_T, rows_R[:0], tables, data.clone(), lambda layer: None).shape == (0, VOCAB)


def test_an_error_of_the_observer_ends_the_step(ops: Ops) -> None:
    model = make_model(ops, "fp32")
    run = whole_step(ops, model)
    ids_T, rows_R, tables, data = make_case(ops, model, torch.float32)

    def fail(layer: int) -> None:
        if layer == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(ids_T, rows_R, tables, data, fail)
    assert run(ids_T, rows_R, tables, data, lambda layer: None).isfinite().all()
