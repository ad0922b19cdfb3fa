"""Model folders are checked before they are loaded."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import save_tiny
from workers.errors import ModelDamaged, ModelRefused
from workers.model.fallback import load_fallback
from workers.model.loader import check_weights, fingerprint_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_a_good_folder_loads_and_reports_progress(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    model = load_fallback(folder, torch.float32, lambda stage, done: seen.append((stage, done)))
    assert model.spec.num_layers == 3
    assert ("loading weights", 1.0) in seen
    assert all(0 <= done <= 1 for _, done in seen)


def test_weights_of_other_kinds_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"no \*\.safetensors"):
        check_weights(folder)


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_file_cut_short_is_damaged(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ModelDamaged, match="its header promises"):
        load_fallback(folder, torch.float32)


@pytest.mark.parametrize(
    "content", [b"", b"\x08", b"\xff" * 64, b"\x05\0\0\0\0\0\0\0{bad}rest", b"\x02\0\0\0\0\0\0\0[]"]
)
def test_garbage_is_damaged(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelDamaged):
        check_weights(folder)


def test_a_missing_tensor_is_damaged_not_random(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("model.layers.1.self_attn.q_proj.weight"))
    with pytest.raises(ModelDamaged, match=r"1 missing keys, first model\.layers\.1\.self_attn\.q_proj"):
        load_fallback(folder, torch.float32)


def test_a_tensor_of_another_shape_is_damaged(folder: Path) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.ones(95)

    rewrite(folder, change)
    with pytest.raises(ModelDamaged, match=r"model\.norm\.weight"):
        load_fallback(folder, torch.float32)


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "nosuch", "architectures": ["NoSuchForCausalLM"]})
    )
    with pytest.raises(ModelRefused, match="nosuch"):
        load_fallback(folder, torch.float32)


def test_the_fingerprint_tells_weights_apart(folder: Path) -> None:
    first = fingerprint_weights(folder)
    assert fingerprint_weights(folder) == first
    rewrite(folder, lambda weights: weights["model.layers.2.mlp.up_proj.weight"][0].add_(1))
    assert fingerprint_weights(folder) != first
