"""Facts of config.json: KV arithmetic, rope angles against transformers, and refusals by name."""

import json
import math
from pathlib import Path

import pytest
import torch

from workers.errors import ModelDamaged, ModelRefused
from workers.model.arch import describe_spec, make_spec, plan_frequencies, read_spec, rotation_angles

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
}  # fmt: skip
LLAMA3 = SMOLLM2 | {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
LLAMA2_13B = SMOLLM2 | {
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": None,
}


def test_kv_bytes_per_token() -> None:
    assert make_spec(SMOLLM2).kv_bytes_per_token(2) == 22.5 * 1024
    assert make_spec(LLAMA3).kv_bytes_per_token(2) == 128 * 1024
    thirteen = make_spec(LLAMA2_13B)
    assert thirteen.kv_bytes_per_token(2) == 819_200
    assert thirteen.kv_bytes_per_token(2) * 4096 == 3.125 * 2**30
    assert thirteen.kv_bytes_per_token_and_layer(2) * 40 == 819_200


@pytest.mark.parametrize("scaling", [None, LLAMA3["rope_scaling"], {"rope_type": "linear", "factor": 4.0}])
def test_angles_equal_transformers(scaling) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    old = LLAMA3 | {"rope_scaling": scaling}
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**new))
    cos, sin = rotary(torch.zeros(1, 1, 1), position_ids=torch.tensor([[1234]]))
    for config in (old, new):
        rope = make_spec(config).rope
        assert rope is not None
        angles = rotation_angles(rope, 1234)
        assert angles is not None
        assert len(angles) == 64
        assert [math.cos(a) for a in angles] == pytest.approx(cos[0, 0, :64].tolist(), abs=2e-4)
        assert [math.sin(a) for a in angles] == pytest.approx(sin[0, 0, :64].tolist(), abs=2e-4)
        assert list(plan_frequencies(rope) or ()) == pytest.approx(rotary.inv_freq.tolist())


def test_a_rope_we_do_not_compute_is_named_without_angles() -> None:
    spec = make_spec(LLAMA3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    facts = describe_spec(spec, 4, num_tokens=5, position=4)
    assert (facts["rope"]["kind"], facts["rope"]["angles"]) == ("yarn", None)


def test_the_description_is_json() -> None:
    facts = json.loads(json.dumps(describe_spec(make_spec(SMOLLM2), 4, num_tokens=36, position=35)))
    assert facts["embedding_shape"] == [36, 576]
    assert facts["rope"]["theta"] == 100000.0
    assert facts["rope"]["angles"][0] == 35.0
    assert len(facts["rope"]["angles"]) == 32
    assert facts["kv_bytes_per_token"] == 46_080


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration.*decoder-only"),
        ({"architectures": None}, "without architectures"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"kv_lora_rank": 512}, "latents"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"architectures": ["MambaForCausalLM"], "num_attention_heads": None}, "MambaForCausalLM.*num_attention_heads"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        make_spec(SMOLLM2 | changes)


def test_broken_configs_are_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelDamaged, match="cannot be read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelDamaged, match="no JSON object"):
        read_spec(tmp_path)


def test_older_names_of_the_same_facts() -> None:
    old = {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_ctx": 1024,
        "vocab_size": 50257,
    }
    spec = make_spec(old)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.max_positions) == (12, 12, 64, 1024)
    assert (spec.intermediate_size, spec.rope) == (3072, None)
