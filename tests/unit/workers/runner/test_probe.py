"""What does not work over a paged cache is refused at load, also where it would answer nonsense without an error."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.tiny_models import save_tiny
from workers.errors import ModelRefused
from workers.model.build import WeightMode, load_decoder
from workers.model.fallback import load_fallback
from workers.model.paged_attention import StepFacts
from workers.ops.reference import ReferenceOps
from workers.runner.model_runner import digest_facts, load_runner
from workers.runner.probe import Model, prove_model


class Meddler:
    """A model that changes one input of the model it wraps."""

    def __init__(self, inner: Model, meddle) -> None:
        self.inner, self.meddle = inner, meddle
        self.spec, self.dtype, self.state = inner.spec, inner.dtype, inner.state

    def forward(self, ids_T: Tensor, positions_T: Tensor, rows_R: Tensor, facts: StepFacts) -> Tensor:
        return self.inner.forward(*self.meddle(ids_T, positions_T, rows_R, facts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return load_fallback(folder, torch.float32)


def test_an_honest_model_passes(model: Model) -> None:
    prove_model(model)
    prove_model(Meddler(model, lambda *inputs: inputs))


def test_a_model_that_counts_positions_itself_is_refused(model: Model) -> None:
    with pytest.raises(ModelRefused, match="answers differently in a batch"):
        prove_model(Meddler(model, lambda ids, positions, rows, facts: (ids, torch.arange(len(ids)), rows, facts)))


def test_a_model_that_writes_to_wrong_blocks_is_refused(model: Model) -> None:
    def meddle(ids: Tensor, positions: Tensor, rows: Tensor, facts: StepFacts):
        facts.tables = tuple(replace(tables, block_of_T=tables.block_of_T.roll(1)) for tables in facts.tables)
        return ids, positions, rows, facts

    with pytest.raises(ModelRefused, match="answers differently in a batch"):
        prove_model(Meddler(model, meddle))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mamba", {}, "attention once per layer: \\[\\] of 3"),
        ("gpt_oss", {}, "GptOssAttention asks for s_aux"),
        ("gemma2", {}, "attn_logit_softcapping"),
        ("stablelm", {}, "StableLmForCausalLM does not run over a paged cache"),
        ("qwen3_next", {}, "linear_attention"),
        ("deepseek_v3", {}, "the cache holds latents"),
    ],
)
def test_what_bypasses_or_extends_attention_is_refused_by_name(
    tmp_path: Path, kind: str, changes: dict, message: str
) -> None:
    save_tiny(kind, tmp_path, **changes)
    with pytest.raises(ModelRefused, match=message):
        load_runner(tmp_path, "fp32", "fp32", 4, 8)


def test_the_digest_tells_models_dtypes_and_ropes_apart(tmp_path: Path) -> None:
    for name, theta in (("a", 10000.0), ("b", 20000.0)):
        save_tiny("llama", tmp_path / name, rope_parameters={"rope_type": "default", "rope_theta": theta})
    specs = {name: load_fallback(tmp_path / name, torch.float32).spec for name in ("a", "b")}
    first = digest_facts(tmp_path / "a", specs["a"], "fp32")
    assert first == digest_facts(tmp_path / "a", specs["a"], "fp32")
    assert first != digest_facts(tmp_path / "a", specs["a"], "bf16")
    assert first != digest_facts(tmp_path / "a", specs["b"], "fp32")
    assert first["weights"] == digest_facts(tmp_path / "b", specs["b"], "fp32")["weights"]


@pytest.mark.parametrize("mode", ["q4", "int8"])
def test_rounded_weights_in_plain_torch_are_proven_too(smollm2: Path, mode: WeightMode) -> None:
    """Where the kernels are stale or not built, a mode that was asked for by name is served all the same."""
    prove_model(load_decoder(smollm2, mode, ReferenceOps()))
