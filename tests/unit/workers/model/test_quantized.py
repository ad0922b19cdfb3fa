"""Quantized checkpoints: the values that were written come back, and what is damaged or not read is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.decoder_runs import load
from tests.support.quantized_folders import LAYOUTS, save_quantized
from workers.errors import ModelDamaged, ModelRefused
from workers.model.arch import read_config
from workers.model.checkpoint import Checkpoint, Cut
from workers.model.fallback import load_fallback
from workers.model.quantized import QuantizedRows
from workers.model.scheme import read_scheme
from workers.ops.weights import Int8Weight, Q4Weight
from workers.quantization import int8

QKV = [(f"model.layers.0.self_attn.{x}_proj.weight", rows) for x, rows in (("q", 128), ("k", 32), ("v", 32))]
MODULE = "model.layers.0.mlp.gate_proj"


def open_rows(folder: Path) -> QuantizedRows:
    scheme = read_scheme(read_config(folder))
    assert scheme is not None
    return QuantizedRows(Checkpoint(folder), scheme)


@pytest.fixture(scope="module", params=LAYOUTS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def written(name: str, tmp_path_factory) -> tuple[Path, Path]:
    """The quantized folder and the dense one."""
    root = tmp_path_factory.mktemp("quantized")
    save_quantized(LAYOUTS[name], root / "quantized", root / "dense")
    return root / "quantized", root / "dense"


def test_every_value_comes_back(written: tuple[Path, Path]) -> None:
    rows = open_rows(written[0])
    for tensor, weight in load_file(written[1] / "model.safetensors").items():
        if weight.dim() == 2:
            found = rows.read_rows([(tensor, weight.shape[0])], weight.shape[1], torch.float32)
            assert torch.equal(found, weight), tensor


def test_parts_are_fused_and_cut(written: tuple[Path, Path]) -> None:
    dense = load_file(written[1] / "model.safetensors")
    cut = Cut((range(64, 128), range(16), range(16, 32)), range(32, 96))
    found = open_rows(written[0]).read_rows(QKV, 128, torch.bfloat16, cut)
    parts = [dense[tensor][kept.start : kept.stop, 32:96] for (tensor, _), kept in zip(QKV, cut.rows, strict=True)]
    assert torch.equal(found, torch.cat(parts).to(torch.bfloat16))


def test_grids_that_fit_are_kept(name: str, written: tuple[Path, Path]) -> None:
    layout = LAYOUTS[name]
    dense = load_file(written[1] / "model.safetensors")
    expected = torch.cat([dense[tensor] for tensor, _ in QKV])
    rows = open_rows(written[0])
    q4, eight = rows.read_q4(QKV, 128), rows.read_int8(QKV, 128)
    assert isinstance(q4, Q4Weight) == layout.fits_q4
    assert isinstance(eight, Int8Weight) == layout.fits_int8
    if eight is not None:
        assert torch.equal(int8.dequantize_rows(eight.q_NK, eight.scale_N), expected)
    assert rows.read_q4([("model.layers.1.mlp.down_proj.weight", 128)], 384) is None, "stored as floats"


def rewrite(source: Path, to: Path, change) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((source / "config.json").read_text())
    return to


def parts_of(folder: Path) -> list[str]:
    needed = sorted(t for t in load_file(folder / "model.safetensors") if t.startswith(MODULE))
    has_order = json.loads((folder / "config.json").read_text())["quantization_config"].get("desc_act")
    return [tensor for tensor in needed if has_order or not tensor.endswith(".g_idx")]


def test_a_missing_tensor_is_named(written: tuple[Path, Path], tmp_path: Path) -> None:
    for tensor in parts_of(written[0]):
        folder = rewrite(written[0], tmp_path, lambda tensors, gone=tensor: tensors.pop(gone))
        with pytest.raises(ModelDamaged, match=f"tensor {tensor} is missing"):
            load(folder)


def test_a_tensor_of_another_shape_is_named(written: tuple[Path, Path], tmp_path: Path) -> None:
    for tensor in parts_of(written[0]):

        def grow(tensors: dict[str, torch.Tensor], grown: str = tensor) -> None:
            tensors[grown] = torch.cat((tensors[grown].view(torch.uint8), tensors[grown].view(torch.uint8))).view(
                tensors[grown].dtype
            )

        with pytest.raises(ModelDamaged, match=rf"/model\.safetensors: tensor {tensor} is \[\d+.*\], config"):
            load(rewrite(written[0], tmp_path, grow))


def test_a_scale_that_is_no_number_is_named(written: tuple[Path, Path], tmp_path: Path) -> None:
    (scale,) = (tensor for tensor in parts_of(written[0]) if "scale" in tensor)
    for value in (torch.nan, torch.inf):

        def spoil(tensors: dict[str, torch.Tensor], value: float = value) -> None:
            tensors[scale].view(-1)[-1] = value

        with pytest.raises(ModelDamaged, match=rf"/model\.safetensors: tensor {scale} holds scales that are not"):
            load(rewrite(written[0], tmp_path, spoil))


def test_a_file_cut_short_or_with_a_huge_header(written: tuple[Path, Path], tmp_path: Path) -> None:
    folder = rewrite(written[0], tmp_path, lambda tensors: None)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(ModelDamaged, match=r"model\.safetensors has \d+ bytes, its header promises"):
        load(folder)
    path.write_bytes((1 << 40).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ModelDamaged, match=r"model\.safetensors .*header of 1099511627776 bytes"):
        load(folder)


def test_a_header_that_contradicts_itself_names_the_file(tmp_path: Path) -> None:
    """The bytes add up; the shape does not."""
    folder = save("awq, groups of 64", tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["lm_head.weight"]["shape"][0] += 1
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(ModelDamaged, match=r"quantized/model\.safetensors cannot be read"):
        load(folder)


def save(layout: str, tmp_path: Path) -> Path:
    save_quantized(LAYOUTS[layout], tmp_path / "quantized", tmp_path / "dense")
    return tmp_path / "quantized"


@pytest.mark.parametrize("layout", ["gptq v1, act-order", "int4 packed, act-order"])
def test_an_index_outside_the_groups_is_named(layout: str, tmp_path: Path) -> None:
    folder = save(layout, tmp_path)
    (index,) = (tensor for tensor in parts_of(folder) if tensor.endswith("g_idx"))
    for value in (-1, 4):

        def spoil(tensors: dict[str, torch.Tensor], value: int = value) -> None:
            tensors[index][3] = value

        with pytest.raises(ModelDamaged, match=f"{index} names groups outside 0 to 3"):
            load(rewrite(folder, folder, spoil))


def test_numbers_of_another_kind_are_named(tmp_path: Path) -> None:
    folder = save("fp8 in blocks of 128", tmp_path)
    tensor = f"{MODULE}.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor].view(torch.uint8)[0, 0] = 0x7F

    with pytest.raises(ModelDamaged, match=f"tensor {tensor} holds numbers that are not finite"):
        load(rewrite(folder, folder, spoil))
    rewrite(folder, folder, lambda tensors: tensors.update({tensor: tensors[tensor].view(torch.int8)}))
    with pytest.raises(ModelDamaged, match=rf"tensor {tensor} holds torch\.int8, not one of float8_e4m3fn"):
        load(folder)


def test_a_shape_that_the_file_contradicts_is_named(tmp_path: Path) -> None:
    folder = save("int4 packed, groups of 128", tmp_path)
    rewrite(folder, folder, lambda tensors: tensors.update({f"{MODULE}.weight_shape": torch.tensor([128, 384])}))
    with pytest.raises(ModelDamaged, match=r"weight_shape says \[128, 384\], config.json says \[384, 128\]"):
        load(folder)


def test_a_config_that_lost_its_scheme_is_told_so(tmp_path: Path) -> None:
    """Eight-bit floats would else load as if they were the weights."""
    cases = {
        "fp8 per tensor": r"q_proj\.weight holds torch\.float8_e4m3fn",
        "awq, groups of 64": r"q_proj\.weight is missing, .*q_proj\.qweight is there: config\.json has lost",
        "int4 packed, act-order": r"q_proj\.weight is missing, .*q_proj\.weight_packed is there",
    }
    for layout, reason in cases.items():
        folder = save(layout, tmp_path)
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelDamaged, match=reason):
            load(folder)


def test_the_transformers_classes_refuse_what_is_quantized(tmp_path: Path) -> None:
    folder = save("awq, groups of 64", tmp_path)
    with pytest.raises(ModelRefused, match="quantized already"):
        load_fallback(folder, torch.float32)
