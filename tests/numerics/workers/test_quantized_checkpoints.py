"""A tiny llama in every layout of quantized checkpoints, against transformers on the float32 model of its values."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.support.decoder_runs import compute_logits, load
from tests.support.native_runs import load_native, logits_whole
from tests.support.quantized_folders import LAYOUTS, save_quantized
from tests.support.rank_threads import RankThreads
from workers.ops.native import Level
from workers.ops.reference import ReferenceOps

TEXT = list(range(5, 45))


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_of_the_values_that_were_written(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    layout = LAYOUTS[name]
    save_quantized(layout, tmp_path / "quantized", tmp_path / "dense")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([TEXT])).logits[0]
    found = compute_logits(load(tmp_path / "quantized"), TEXT)
    assert expected.std() > 0.1, "logits that could differ"
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["awq, groups of 64", "gptq v1, act-order"])
def test_native_kernels_compute_with_four_bits_of_the_file(name: str, tmp_path: Path) -> None:
    """What the reference does with them, but for activations that round the other way."""
    save_quantized(LAYOUTS[name], tmp_path / "quantized", tmp_path / "dense")
    expected = compute_logits(load(tmp_path / "quantized", "q4"), TEXT)
    found = logits_whole(load_native(tmp_path / "quantized", "q4", 1), "fp32", TEXT)
    assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("level", get_args(Level))
def test_native_kernels_compute_with_rows_down_to_minus_128(level: Level, tmp_path: Path) -> None:
    save_quantized(LAYOUTS["int8 per channel"], tmp_path / "quantized", tmp_path / "dense")
    expected = compute_logits(load(tmp_path / "quantized", "int8"), TEXT)
    found = logits_whole(load_native(tmp_path / "quantized", "int8", 1, level), "fp32", TEXT)
    assert (found - expected).abs().max() <= 1e-3


def test_ranks_hold_the_grid_values_of_the_whole(tmp_path: Path) -> None:
    save_quantized(LAYOUTS["awq, groups of 64"], tmp_path / "quantized", tmp_path / "dense")
    whole = load(tmp_path / "quantized", "q4").weights.layers[0]
    ranks = RankThreads(tmp_path / "quantized", "q4", ReferenceOps, 2, 4, 8)
    ranks.close()
    first, second = (decoder.weights.layers[0] for decoder in ranks.decoders)
    assert torch.equal(whole.out.data_NK, torch.cat((first.out.data_NK, second.out.data_NK), dim=1))
    assert torch.equal(whole.qkv.data_NK[:64], first.qkv.data_NK[:64])
    assert torch.equal(whole.mlp.down.data_NK, torch.cat((first.mlp.down.data_NK, second.mlp.down.data_NK), dim=1))
