"""The reference against formulas written out token by token: it is the oracle of every other backend."""

import math

import pytest
import torch

from tests.support.ops_cases import make_layer, make_step, random_cache, random_rope, random_tensor
from workers.ops.reference import ReferenceOps
from workers.ops.weights import DenseMLP, DenseWeight, RoutedMLP

OPS = ReferenceOps(torch.float64)


def attend_by_hand(q_HD, layer, position: int, k_CJD, v_CJD) -> torch.Tensor:
    """One token: `[H, D]`."""
    first = 0 if layer.window is None else max(0, position + 1 - layer.window)
    out = []
    for head, q_D in enumerate(q_HD):
        kv_head = head // (layer.num_heads // layer.num_kv_heads)
        scores = [float(q_D @ k_CJD[c, kv_head]) * layer.scale for c in range(first, position + 1)]
        if layer.softcap is not None:
            scores = [layer.softcap * math.tanh(score / layer.softcap) for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (math.exp(float(layer.sinks_H[head])) if layer.sinks_H is not None else 0.0)
        values = (w / total * v_CJD[c, kv_head] for w, c in zip(weights, range(first, position + 1), strict=True))
        out.append(sum(values))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_is_the_textbooks(window, softcap, has_sinks: bool) -> None:
    sinks_H = random_tensor(4) if has_sinks else None
    layer = make_layer(4, 2, 16, window=window, softcap=softcap, sinks_H=sinks_H)
    tables, num_blocks = make_step([(0, 4), (9, 1), (5, 6)], 4)
    cache = random_cache(tables, num_blocks, layer, 4, torch.float64)
    q_THD = random_tensor(11, 4, 16).double()
    found_THD = OPS.attend(q_THD, layer, tables, cache).reshape(11, 4, 16)
    for span in tables.spans:
        table = tables.table_X[span.first_entry : span.first_entry + span.num_blocks].tolist()
        k_CJD, v_CJD = (
            torch.stack([cache[table[c // 4], which, :, c % 4] for c in range(span.context)]) for which in (0, 1)
        )
        for offset in range(span.num_tokens):
            row = span.first_row + offset
            expected_HD = attend_by_hand(q_THD[row], layer, span.first_position + offset, k_CJD, v_CJD)
            torch.testing.assert_close(found_THD[row], expected_HD, rtol=1e-12, atol=1e-12)


def test_rope_turns_pairs_by_their_angle_and_keeps_the_rest() -> None:
    layer = make_layer(2, 1, 10, rope=random_rope(3, 40))
    tables, num_blocks = make_step([(7, 2)], 16)
    cache = random_cache(tables, num_blocks, layer, 16, torch.float64)
    qkv_TN = random_tensor(2, 40).double()
    q_THD = OPS.rotate_and_store(qkv_TN, layer, tables, cache)
    for row, position in enumerate((7, 8)):
        q_D = qkv_TN[row, 10:20]
        for pair in range(3):
            cos, sin = float(layer.rope.cos_LR[position, pair]), float(layer.rope.sin_LR[position, pair])
            x, y = float(q_D[pair]), float(q_D[pair + 3])
            assert float(q_THD[row, 1, pair]) == pytest.approx(x * cos - y * sin)
            assert float(q_THD[row, 1, pair + 3]) == pytest.approx(y * cos + x * sin)
        assert torch.equal(q_THD[row, 1, 6:], q_D[6:])
        stored_2D = cache[tables.block_of_T[row], :, 0, tables.slot_of_T[row]]
        assert torch.equal(stored_2D[1], qkv_TN[row, 30:])


def test_a_token_visits_its_best_experts_with_their_shares() -> None:
    experts = tuple(
        DenseMLP(
            gate_up=OPS.pack(DenseWeight(random_tensor(16, 8, seed=e))),
            down=OPS.pack(DenseWeight(random_tensor(8, 8, seed=10 + e))),
            activation="silu",
        )
        for e in range(4)
    )
    x_TM, bias_E = random_tensor(5, 8).double(), random_tensor(4)
    router = DenseWeight(random_tensor(4, 8, seed=3))
    for renormalize in (True, False):
        mlp = RoutedMLP(
            router=OPS.pack(router), router_bias_E=bias_E, top_k=2, renormalize=renormalize, experts=experts
        )
        found_TM = OPS.experts(x_TM, mlp)
        for x_M, found_M in zip(x_TM, found_TM, strict=True):
            shares = torch.softmax(router.data_NK.double() @ x_M + bias_E, 0)
            best = sorted(range(4), key=lambda e, shares=shares: -float(shares[e]))[:2]
            total = sum(float(shares[e]) for e in best) if renormalize else 1.0
            expected_M = sum(shares[e] / total * OPS.dense_mlp(x_M[None], experts[e])[0] for e in best)
            torch.testing.assert_close(found_M, expected_M)


def test_norm_and_activations_are_their_formulas() -> None:
    x, y = 1.7, -0.4
    row = torch.tensor([[x, y]], dtype=torch.float64)
    rms = math.sqrt((x * x + y * y) / 2 + 1e-6)
    assert OPS.norm(row, torch.tensor([2.0, 3.0]), 1e-6)[0].tolist() == pytest.approx([2 * x / rms, 3 * y / rms])
    assert float(OPS.activate(row, "silu")) == pytest.approx(x / (1 + math.exp(-x)) * y)
    gelu = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert float(OPS.activate(row, "gelu_tanh")) == pytest.approx(gelu * y)
    assert float(OPS.activate(row, "swiglu_clamp")) == pytest.approx((y + 1) * x / (1 + math.exp(-1.702 * x)))
    beyond = torch.tensor([[9.0, -9.0]], dtype=torch.float64)
    assert float(OPS.activate(beyond, "swiglu_clamp")) == pytest.approx(-6 * 7 / (1 + math.exp(-1.702 * 7)))
