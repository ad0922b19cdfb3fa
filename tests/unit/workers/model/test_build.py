"""Loading: progress, what is shared, what is refused, and what a damaged folder says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.decoder_runs import load, make_cache
from tests.support.tiny_models import save_tiny
from workers.engine.plan import Chunk, StepPlan
from workers.errors import ModelDamaged, ModelRefused
from workers.model.build import load_decoder, quantize
from workers.model.checkpoint import Checkpoint
from workers.ops.reference import ReferenceOps
from workers.ops.weights import DenseWeight, Int8Weight, Q4Weight, Q8Weight
from workers.protocol import SamplingParams, StreamKey
from workers.runner.batch import make_batch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_progress_ends_at_one_and_never_falls(folder: Path) -> None:
    seen: list[float] = []
    load_decoder(folder, "fp32", ReferenceOps(), lambda stage, done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 10


def test_a_tied_head_is_the_embedding_and_counts_once(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, tie_word_embeddings=True)
    tied = load(tmp_path).weights
    assert tied.head is tied.embedding
    matrices = 211 * 96 + 3 * (96 * 96 * 2 + 2 * 96 * 32 + 3 * 96 * 128)
    assert tied.num_bytes == 4 * matrices


def test_ropes_of_equal_layers_are_one_table(folder: Path) -> None:
    layers = load(folder).weights.layers
    assert len({id(layer.attention.rope) for layer in layers}) == 1
    assert layers[0].attention.rope.max_positions == 512
    short = load_decoder(folder, "fp32", ReferenceOps(), max_positions=40).weights.layers[0]
    assert short.attention.rope.max_positions == 40


def test_the_grid_of_each_mode() -> None:
    dense = torch.randn(4, 64)
    kinds = [type(quantize(dense, mode, head)) for mode in ("fp32", "bf16", "int8", "q4") for head in (False, True)]
    assert kinds == [DenseWeight] * 4 + [Int8Weight] * 2 + [Q4Weight, Q8Weight]
    odd = quantize(torch.randn(4, 40), "q4")
    assert isinstance(odd, DenseWeight)
    assert odd.data_NK.dtype == torch.bfloat16


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelDamaged, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load(folder)


def test_another_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(95)}))
    with pytest.raises(ModelDamaged, match=r"model\.norm\.weight is \[95\], config.json says \[96\]"):
        load(folder)


def test_integers_are_no_weights(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(96, dtype=torch.int32)}))
    with pytest.raises(ModelDamaged, match=r"torch\.int32"):
        load(folder)


def test_no_safetensors_and_cut_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelDamaged, match="promises"):
        load(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"no \*\.safetensors"):
        load(folder)


def test_an_unknown_architecture_is_refused_before_weights_are_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["PhiForCausalLM"]}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="PhiForCausalLM is not one of"):
        load(folder)


def test_a_checkpoint_of_several_files(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in names[:9]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, folder / "model-00002-of-00002.safetensors")
    checkpoint = Checkpoint(folder)
    assert all(torch.equal(checkpoint.read(name, tuple(tensors[name].shape)), tensors[name]) for name in names)


def test_layers_are_reported_once_their_cache_is_written(folder: Path) -> None:
    """K and V of the step are in the cache of the layer, and of no later one, when it is reported."""
    decoder = load(folder)
    cache = make_cache(decoder, 4, 8)
    seen: list[list[bool]] = []

    def look(layer: int) -> None:
        assert len(seen) == layer
        seen.append([bool(cache.data[each, 5, :, :, 2].all()) for each in range(3)])

    plan = StepPlan(
        (Chunk(StreamKey(bytes(16), 0), tuple(range(3, 10)), 0, ((1, 5),), SamplingParams(), 0, False, True),)
    )
    batch = make_batch(plan, cache, look)
    decoder.forward(batch.ids_T, batch.positions_T, batch.rows_R, batch.facts)
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]


def test_block_tables_of_a_step(folder: Path) -> None:
    cache = make_cache(load(folder), 4, 32)
    chunks = (
        Chunk(StreamKey(bytes(16), 0), (9,), 8, ((7, 30, 2),), SamplingParams(), 0, False, False),
        Chunk(StreamKey(bytes(16), 1), (3, 4, 5, 6, 7), 3, ((0, 31, 9),), None, 0, False, True),
    )
    batch = make_batch(StepPlan(chunks), cache, lambda layer: None)
    (tables,) = batch.facts.tables
    assert tables.table_X.tolist() == [7, 30, 2, 0, 31]
    assert [tuple(span) for span in tables.spans] == [(0, 1, 8, 0, 3), (1, 5, 3, 3, 2)]
