"""A small GGUF file, written with the gguf package, comes out as the model it was made from."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from tests.support.tiny_models import save_tiny
from workers.errors import ModelDamaged, ModelRefused
from workers.model.fallback import load_fallback
from workers.model.gguf import convert_gguf, is_converted, rename_tensor, unpermute
from workers.model.gguf_grids import GGUFGrids, open_grids
from workers.ops.reference import dequantize as dequantize_weight

PIECES = ["<|end|>", "<|start|>", "Ġ", "a", "b", "4", "5", "Ġa", "45", *[f"x{i}" for i in range(202)]]
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name in ("model.norm.weight", "lm_head.weight"):
        return {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


def write_gguf(path: Path, weights: dict[str, torch.Tensor], arch: str = "llama", pre: str = "smollm") -> None:
    writer = GGUFWriter(path, arch)
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(128)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(PIECES)
    writer.add_token_types([3, 3, *[1] * (len(PIECES) - 2)])
    writer.add_token_merges(["Ġ a", "4 5"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in weights.items():
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = permute(weight, 6 if "q_proj" in name else 2)
        if "mlp" in name:
            packed = quantize(weight, GGMLQuantizationType.Q4_1)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in save_tiny("llama", tmp_path / "origin").state_dict().items()}


@pytest.fixture
def gguf_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    write_gguf(tmp_path / "tiny.gguf", weights)
    return tmp_path / "tiny.gguf"


def test_weights_come_out_exactly(gguf_file: Path, tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    out = tmp_path / "out"
    seen: list[float] = []
    convert_gguf(gguf_file, out, lambda stage, done: seen.append(done))
    assert is_converted(out)
    assert seen[-1] == 1.0
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == weights.keys()
    for name, tensor in weights.items():
        if "mlp" in name:
            packed = quantize(tensor.numpy(), GGMLQuantizationType.Q4_1)
            tensor = torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q4_1))
        assert torch.equal(converted[name], tensor), name
    header = (out / "model.safetensors").read_bytes()
    assert (8 + int.from_bytes(header[:8], "little")) % 64 == 0
    spec = load_fallback(out, torch.float32).spec
    assert (spec.norm_eps, spec.rope.theta, spec.head_dim) == (1e-6, 10000.0, 16)


def test_the_tokenizer_splits_digits_and_knows_its_special_tokens(gguf_file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    convert_gguf(gguf_file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer.encode(" 45") == [2, 5, 6], "digits stand alone, the space too"
    assert tokenizer.encode("<|start|>b a<|end|>") == [1, 4, 7, 0]
    assert tokenizer.decode([1, 4, 7, 0], skip_special_tokens=True) == "b a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 0)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "hello"


def test_without_smollm_rules_digits_merge(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "tiny.gguf", weights, pre="gpt-2")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("45").ids == [8]


@pytest.mark.parametrize(
    ("options", "message"), [({"arch": "qwen2"}, "architecture 'qwen2'"), ({"pre": "qwen2"}, "tokenizer gpt2/qwen2")]
)
def test_unknown_kinds_are_refused_and_leave_nothing(tmp_path: Path, weights, options: dict, message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", weights, **options)
    with pytest.raises(ModelRefused, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["origin", "tiny.gguf"]


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1, -4000])
def test_a_file_cut_short_is_damaged(gguf_file: Path, tmp_path: Path, keep: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(ModelDamaged):
        convert_gguf(gguf_file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_finished_folder_is_left_alone_and_leftovers_go(gguf_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    dead = tmp_path / f"out.partial-{2**22 + 1}"
    dead.mkdir()
    convert_gguf(gguf_file, out)
    assert not dead.exists()
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    convert_gguf(gguf_file, out)
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    os.truncate(out / "model.safetensors", 1000)
    assert not is_converted(out)
    (out / "model.safetensors").unlink()
    manifest = json.loads((out / "baton.json").read_text())
    (out / "baton.json").write_text(json.dumps(manifest | {"format": "older"}))
    assert not is_converted(out)


def test_names() -> None:
    assert rename_tensor("blk.7.ffn_up.weight") == "model.layers.7.mlp.up_proj.weight"
    for unknown in ("blk.7.ffn_gate_exps.weight", "rope_freqs.weight", "blk.7.attn_q.bias"):
        with pytest.raises(ModelRefused, match="not known"):
            rename_tensor(unknown)


def test_unpermute_undoes_permute() -> None:
    weight = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    assert np.array_equal(unpermute(permute(weight, 3), 3), weight)
    assert not np.array_equal(permute(weight, 3), weight)


def test_grids_are_read_as_they_lie_in_the_file(gguf_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_gguf(gguf_file, out)
    config = json.loads((out / "config.json").read_text())
    assert open_grids(out, config) is None, "the file does not lie beside the weights"
    gguf_file.rename(out / gguf_file.name)
    grids = open_grids(out, config)
    converted = load_file(out / "model.safetensors")
    gate_up = [(f"model.layers.1.mlp.{name}_proj.weight", 128) for name in ("gate", "up")]
    weight = grids.read_q4(gate_up, 96)
    assert torch.equal(dequantize_weight(weight), torch.cat([converted[name] for name, _ in gate_up]))
    assert grids.read_q4(gate_up, 128) is None
    assert grids.read_q4([("model.layers.1.self_attn.o_proj.weight", 96)], 96) is None, "it is float32"
    assert grids.read_q8(gate_up, 96) is None


@pytest.mark.parametrize("keep", [0, 3, 100, 5000])
def test_grids_of_a_file_cut_short_are_damaged(gguf_file: Path, tmp_path: Path, keep: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(ModelDamaged):
        GGUFGrids(gguf_file, {"num_attention_heads": 6})


def test_a_grid_beyond_the_end_is_damaged(gguf_file: Path, tmp_path: Path) -> None:
    convert_gguf(gguf_file, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    gguf_file.write_bytes(gguf_file.read_bytes()[:-90_000])
    grids = GGUFGrids(gguf_file, config)
    assert grids.read_q4([("model.layers.0.mlp.down_proj.weight", 96)], 128) is not None
    with pytest.raises(ModelDamaged, match="ends within"):
        grids.read_q4([("model.layers.2.mlp.down_proj.weight", 96)], 128)
