"""Every backend against the reference in float64: embedding, norm, linear, activation, MLP, experts, head."""

import pytest
import torch

from tests.support.ops_cases import EXACT_GRIDS, GRIDS, allowed, assert_close, magnitudes, random_tensor, random_weight
from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps
from workers.ops.weights import DenseMLP, DenseWeight, RoutedMLP

SUM = 2e-6
"""Of the sum of magnitudes that a float32 sum may lose, whatever its order."""
ROUTINGS = [(1, 1, True), (4, 2, True), (8, 3, False), (5, 5, True)]
COMPOSED = 1e-5
FLIPS = 2e-2
"""Of the largest output, where a number that rounds the other way in between moves everything after it."""
SHAPES = [(1, 32), (7, 64), (50, 96), (576, 576), (960, 576), (129, 1536)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 65])
def test_linear(ops: Ops, oracle: ReferenceOps, grid: str, rows: int, width: int, tokens: int) -> None:
    weight, x_TK, bias_N = random_weight(grid, rows, width), random_tensor(tokens, width), random_tensor(rows)
    before = x_TK.clone()
    packed = ops.pack(weight)
    assert packed.shape == (rows, width)
    sizes_TN = x_TK.double().abs() @ magnitudes(weight).T + bias_N.abs()
    expected_TN = oracle.linear(x_TK.double(), oracle.pack(weight))
    assert_close(ops.linear(x_TK, packed), expected_TN, allowed(ops, grid, SUM, 2**-8), sizes_TN)
    assert_close(ops.linear(x_TK, packed, bias_N), expected_TN + bias_N, allowed(ops, grid, SUM, 2**-8), sizes_TN)
    assert torch.equal(x_TK, before)


def test_linear_of_many_tokens(ops: Ops, oracle: ReferenceOps) -> None:
    for grid in GRIDS:
        weight, x_TK = random_weight(grid, 40, 96), random_tensor(3001, 96)
        sizes_TN = x_TK.double().abs() @ magnitudes(weight).T
        found_TN = ops.linear(x_TK, ops.pack(weight))
        assert_close(
            found_TN, oracle.linear(x_TK.double(), oracle.pack(weight)), allowed(ops, grid, SUM, 2**-8), sizes_TN
        )


@pytest.mark.parametrize("grid", ["int8", "q4", "q8"])
def test_inputs_are_rounded_as_the_op_set_says(ops: Ops, oracle: ReferenceOps, grid: str) -> None:
    """Zeros, halves, an outlier beside small numbers, and numbers too small for a scale."""
    weight = random_weight(grid, 33, 128)
    x_TK = random_tensor(5, 128)
    x_TK[0] = 0
    x_TK[1, :32] = torch.arange(32) - 0.5
    x_TK[1, 0] = 127.0
    x_TK[2, 40] = 3e4
    x_TK[3, 64:96] = 1e-33
    x_TK[4] *= 1e-20
    expected_TN = oracle.linear(x_TK.double(), oracle.pack(weight))
    sizes_TN = x_TK.double().abs() @ magnitudes(weight).T + 1e-30
    assert_close(ops.linear(x_TK, ops.pack(weight)), expected_TN, SUM, sizes_TN)


@pytest.mark.parametrize("grid", GRIDS)
def test_embed(ops: Ops, oracle: ReferenceOps, grid: str) -> None:
    table, ids_T = random_weight(grid, 211, 96), torch.tensor([0, 210, 5, 5])
    for scale in (1.0, 96**0.5):
        found_TM = ops.embed(ids_T, ops.pack(table), scale)
        assert found_TM.dtype == torch.float32
        assert_close(found_TM, oracle.embed(ids_T, oracle.pack(table), scale), 5e-7)


@pytest.mark.parametrize("width", [32, 80, 100, 576, 4096])
@pytest.mark.parametrize("tokens", [1, 9])
def test_norm(ops: Ops, oracle: ReferenceOps, width: int, tokens: int) -> None:
    x_TM, delta_TM, weight_M = (random_tensor(tokens, width, seed=s) for s in (0, 1, 2))
    weight_M = weight_M[0]
    assert_close(ops.norm(x_TM, weight_M, 1e-5), oracle.norm(x_TM.double(), weight_M, 1e-5), 2e-6)
    stream_TM, expected_TM = x_TM.clone(), x_TM.double()
    found_TM = ops.norm(stream_TM, weight_M, 1e-6, delta_TM)
    assert_close(found_TM, oracle.norm(expected_TM, weight_M, 1e-6, delta_TM.double()), 2e-6)
    assert torch.equal(stream_TM, x_TM + delta_TM)


def test_norm_of_tiny_and_large_rows(ops: Ops, oracle: ReferenceOps) -> None:
    x_TM = random_tensor(4, 64) * torch.tensor([[0.0], [1e-8], [1.0], [1e8]])
    weight_M = torch.ones(64)
    assert_close(ops.norm(x_TM, weight_M, 1e-6), oracle.norm(x_TM.double(), weight_M, 1e-6), 2e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamp"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (1, 64), (5, 100), (700, 48)])
def test_activate(ops: Ops, oracle: ReferenceOps, activation, tokens: int, size: int) -> None:
    gate_up_TN = random_tensor(tokens, 2 * size, scale=6.0)
    expected_TI = oracle.activate(gate_up_TN.double(), activation)
    assert_close(ops.activate(gate_up_TN, activation), expected_TI, 2e-6)


def test_activate_far_from_zero(ops: Ops, oracle: ReferenceOps) -> None:
    gate_up_TN = torch.tensor([[-1e4, -100.0, -20.0, 20.0, 100.0, 1e4] + [2.0] * 6])
    for activation in ("silu", "gelu_tanh", "swiglu_clamp"):
        expected_TI = oracle.activate(gate_up_TN.double(), activation)  # type: ignore[arg-type]
        assert_close(ops.activate(gate_up_TN, activation), expected_TI, 2e-6)  # type: ignore[arg-type]


def make_mlp(
    ops: Ops, grid: str, width: int, size: int, activation="silu", seed: int = 0, bias: bool = False
) -> DenseMLP:
    return DenseMLP(
        gate_up=ops.pack(random_weight(grid, 2 * size, width, seed)),
        down=ops.pack(random_weight(grid, width, size, seed + 1)),
        activation=activation,
        gate_up_bias_N=random_tensor(2 * size, seed=seed) if bias else None,
        down_bias_M=random_tensor(width, seed=seed) if bias else None,
    )


@pytest.mark.parametrize("grid", ["fp32", "bf16", "int8", "q4"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_dense_mlp(ops: Ops, oracle: ReferenceOps, grid: str, tokens: int) -> None:
    x_TM = random_tensor(tokens, 96)
    for activation, bias in (("silu", False), ("gelu_tanh", False), ("swiglu_clamp", True)):
        mlps = [make_mlp(each, grid, 96, 160, activation, bias=bias) for each in (ops, oracle)]
        expected_TM = oracle.dense_mlp(x_TM.double(), mlps[1])
        assert_close(
            ops.dense_mlp(x_TM, mlps[0]), expected_TM, allowed(ops, grid, COMPOSED if grid in EXACT_GRIDS else FLIPS)
        )


@pytest.mark.parametrize("grid", ["fp32", "bf16", "q4"])
@pytest.mark.parametrize(("num_experts", "top_k", "renormalize"), ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 4, 70])
def test_experts(
    ops: Ops, oracle: ReferenceOps, grid: str, num_experts: int, top_k: int, renormalize: bool, tokens: int
) -> None:
    x_TM = random_tensor(tokens, 64)

    def make(each: Ops) -> RoutedMLP:
        router = DenseWeight(random_tensor(num_experts, 64, seed=9))
        experts = tuple(
            make_mlp(each, grid, 64, 96, "swiglu_clamp", number, bias=True) for number in range(num_experts)
        )
        return RoutedMLP(
            router=each.pack(router), router_bias_E=random_tensor(num_experts), top_k=top_k, renormalize=renormalize,
            experts=experts,
        )  # fmt: skip

    expected_TM = oracle.experts(x_TM.double(), make(oracle))
    tolerance = allowed(ops, grid, COMPOSED if grid in EXACT_GRIDS else FLIPS)
    assert_close(ops.experts(x_TM, make(ops)), expected_TM, tolerance)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head(ops: Ops, oracle: ReferenceOps, grid: str, rows: int, softcap: float | None) -> None:
    weight, x_RM = random_weight(grid, 1001, 96), random_tensor(rows, 96, scale=4.0)
    found_RV = ops.head(x_RM, ops.pack(weight), softcap)
    assert found_RV.dtype == torch.float32
    assert found_RV.shape == (rows, 1001)
    assert_close(found_RV, oracle.head(x_RM.double(), oracle.pack(weight), softcap), allowed(ops, grid, 4e-6))
