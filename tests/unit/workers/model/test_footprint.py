"""Memory arithmetic against figures that are public, and against what a folder and a model really hold."""

from pathlib import Path

import pytest

from tests.support.tiny_models import save_tiny
from workers.engine.state import StateSpec
from workers.model.footprint import MODE_BITS, count_weights, model_bytes, request_bytes, state_bytes, weight_bytes
from workers.model.state import kv_state

GB, GIB, MI = 10**9, 1 << 30, 1 << 20


def append(entry_bytes: int, tokens_per_entry: int = 1) -> StateSpec:
    return StateSpec(
        stream="kv", kind="append", entry_bytes=entry_bytes, tokens_per_entry=tokens_per_entry, tp_shards=1
    )


def window(entry_bytes: int, tokens: int) -> StateSpec:
    return StateSpec(stream="kv", kind="window", entry_bytes=entry_bytes, window=tokens, tp_shards=1)


@pytest.mark.parametrize(("bits", "gigabytes"), [(32, 28), (16, 14), (8, 7), (4, 3.5)])
def test_seven_billion_weights(bits: int, gigabytes: float) -> None:
    assert weight_bytes(7 * GB, bits) == gigabytes * GB


def test_thirteen_billion_with_one_kv_head_a_query_head() -> None:
    specs = kv_state(40, 128, [None] * 40, "bf16")
    assert request_bytes(specs, 1) == 819_200
    assert request_bytes(specs, 4096) == 3.125 * GIB


def test_grouped_heads() -> None:
    assert request_bytes(kv_state(8, 128, [None] * 32, "bf16"), 1) == 128 << 10
    assert request_bytes(kv_state(3, 64, [None] * 30, "bf16"), 1) == 22.5 * 1024


def test_compressed_attention_of_deepseek_v4_pro() -> None:
    """30 layers pool 4 tokens to an entry of 512 and a key of 128, 31 pool 128 to one; all see 128 tokens whole."""
    pooled = [append(2 * 512, 4)] * 30 + [append(2 * 128, 4)] * 30 + [append(2 * 512, 128)] * 31
    whole = [window(2 * 512, 128)] * 61
    total = request_bytes([*pooled, *whole], MI)
    assert request_bytes(pooled[:30], MI) == 7.5 * GIB
    assert request_bytes(pooled[30:60], MI) == 1.875 * GIB
    assert round(request_bytes(pooled[60:], MI) / GIB, 3) == 0.242
    assert round(total / GIB, 3) == 9.625
    latent = [append(2 * (512 + 64 + 128))] * 61
    assert request_bytes(latent, MI) == 83.875 * GIB
    assert round(100 * total / request_bytes(latent, MI), 1) == 11.5


def test_a_window_stops_growing_and_a_fixed_state_never_does() -> None:
    assert [state_bytes(window(10, 4), n) for n in (1, 4, 9)] == [10, 40, 40]
    fixed = StateSpec(stream="recurrent", kind="fixed", entry_bytes=99, tp_shards=1)
    assert state_bytes(fixed, 0) == state_bytes(fixed, 10**6) == 99
    assert state_bytes(append(8, 4), 7) == 8


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma3_text"])
def test_weights_are_counted_from_the_headers(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path)
    assert count_weights(tmp_path) == sum(parameter.numel() for parameter in model.parameters())


def test_a_tied_head_is_paid_once() -> None:
    assert model_bytes(1000, 400, "fp32", is_tied=True) == 4000
    assert model_bytes(1400, 400, "fp32", is_tied=False) == 5600
    assert model_bytes(1000, 400, "q4", is_tied=True) == 600 * 5 // 8 + 425
    assert model_bytes(1400, 400, "bf16", is_tied=False) == 2800
    assert list(MODE_BITS) == ["fp32", "bf16", "int8", "q4"]


def test_the_shipped_model(smollm2: Path) -> None:
    assert count_weights(smollm2) == 134_515_008
