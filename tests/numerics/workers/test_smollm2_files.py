"""The converted SmolLM2 folder: facts, tokenizer and chat template as transformers reads them, and the file's own
grids."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.oracle import load_tokenizer
from workers.model.arch import read_config, read_spec
from workers.model.checkpoint import Checkpoint
from workers.model.gguf_grids import open_grids
from workers.model.loader import check_weights
from workers.ops.reference import dequantize

pytestmark = pytest.mark.numerics

TEXTS = (
    "Why is the sky blue?", " 45", "a 1 b  22   333\n4", "x=10; y = 20\n\tif x<3:", "it's they'll I'd", "", " ",
    "na\u00efve caf\u00e9 \U0001f642 \u65e5\u672c\u8a9e \u200b", "<|im_start|>user\nhi<|im_end|>\n", "\n\n  \n",
    "3.14159e-10", "000 0 00",
)  # fmt: skip


def test_facts(smollm2: Path) -> None:
    spec = read_spec(smollm2)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.max_positions, spec.norm_eps, spec.rope.theta) == (8192, 1e-5, 100000.0)
    assert spec.kv_bytes_per_token(2) == 22.5 * 1024
    assert check_weights(smollm2) == 4 * 134_515_008


def test_the_tokenizer_splits_digits_and_round_trips(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.encode(" 45") == [216, 36, 37]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer.all_special_ids) >= 3
    assert tokenizer.encode("<|im_end|>") == [2]


def test_the_chat_template_has_its_system_prompt(smollm2: Path) -> None:
    text = load_tokenizer(smollm2).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_grids_of_the_file_are_taken_as_they_are(smollm2: Path) -> None:
    """Dequantized they are bit for bit the converted weights, for the plain, the un-permuted and the 8-bit ones."""
    grids = open_grids(smollm2, read_config(smollm2))
    assert grids is not None
    checkpoint = Checkpoint(smollm2)
    attention = "model.layers.7.self_attn"
    qkv = [(f"{attention}.{name}_proj.weight", rows) for name, rows in (("q", 576), ("k", 192), ("v", 192))]
    for parts, width in ((qkv, 576), ([("model.layers.29.mlp.down_proj.weight", 576)], 1536)):
        weight = grids.read_q4(parts, width)
        assert weight is not None
        assert torch.equal(dequantize(weight), checkpoint.read_rows(parts, width, torch.float32))
    head = [("model.embed_tokens.weight", 49152)]
    weight = grids.read_q8(head, 576)
    assert weight is not None
    assert torch.equal(dequantize(weight), checkpoint.read_rows(head, 576, torch.float32))
    assert grids.read_q4(head, 576) is None
    assert grids.read_q8(qkv, 576) is None
    assert np.isfinite(weight.scale_NG.numpy()).all()
