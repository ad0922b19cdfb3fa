"""Plans of real configs, as their config.json says it; the figures are read off the transformers classes."""

from typing import Any

import pytest

from workers.errors import ModelRefused
from workers.model.arch import Rope
from workers.model.families import plan_decoder

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
SIZES = {
    "num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1000, "intermediate_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip


def plan(architecture: str, **config: Any):
    return plan_decoder({**SIZES, "architectures": [architecture], **config})


def windows(architecture: str, **config: Any) -> list[int | None]:
    return [layer.window for layer in plan(architecture, **config).layers]


def test_llama() -> None:
    found = plan("LlamaForCausalLM", tie_word_embeddings=True)
    assert (found.tied, found.activation, found.attention_scale, found.norm_eps) == (True, "silu", 0.125, 1e-5)
    traits = ("has_qkv_bias", "has_out_bias", "has_mlp_bias", "has_qk_norm")
    assert [getattr(found, trait) for trait in traits] == [False] * 4
    assert found.layers[0].rope.theta == 10000.0, "Llama 2 leaves it out"
    biased = plan("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert [getattr(biased, trait) for trait in traits] == [True, True, True, False]


def test_mistral_windows() -> None:
    assert windows("MistralForCausalLM", sliding_window=100) == [100] * 6
    assert windows("MistralForCausalLM", sliding_window=None) == [None] * 6
    assert windows("MistralForCausalLM") == [4096] * 6


def test_qwen_windows() -> None:
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        off = {"sliding_window": 100, "max_window_layers": 4}
        assert windows(architecture, **off) == [None] * 6
        assert windows(architecture, use_sliding_window=True, **off) == [None] * 4 + [100] * 2
    assert windows("Qwen3MoeForCausalLM", use_sliding_window=True, sliding_window=7, num_experts=4,
                   num_experts_per_tok=2, moe_intermediate_size=64) == [7] * 6  # fmt: skip


def test_qwen_biases_and_norms() -> None:
    two, three = plan("Qwen2ForCausalLM"), plan("Qwen3ForCausalLM")
    assert (two.has_qkv_bias, two.has_out_bias, two.has_qk_norm) == (True, False, False)
    assert (three.has_qkv_bias, three.has_out_bias, three.has_qk_norm) == (False, False, True)


def test_qwen3_moe_mixes_dense_and_routed_layers() -> None:
    found = plan(
        "Qwen3MoeForCausalLM", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=64, norm_topk_prob=True,
        decoder_sparse_step=2, mlp_only_layers=[1],
    )  # fmt: skip
    assert [layer.experts is not None for layer in found.layers] == [False, False, False, True, False, True]
    experts = found.layers[3].experts
    assert (experts.num_experts, experts.top_k, experts.renormalize, experts.intermediate_size) == (128, 8, True, 64)


def test_mixtral() -> None:
    found = plan("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    assert all(layer.experts.renormalize and layer.experts.intermediate_size == 512 for layer in found.layers)
    assert found.layers[0].rope.theta == 1e6
    with pytest.raises(ModelRefused, match="num_experts_per_tok"):
        plan("MixtralForCausalLM", num_local_experts=8)


def test_gemma3_in_the_files_of_the_hub() -> None:
    """Older files: a pattern instead of layer types, one number for the local rope, scaling for the global one."""
    found = plan(
        "Gemma3ForCausalLM", sliding_window=512, sliding_window_pattern=3, rope_theta=1e6, rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh",
    )  # fmt: skip
    assert [layer.window for layer in found.layers] == [512, 512, None, 512, 512, None]
    assert found.layers[0].rope == Rope(2e4, 64, "default", {})
    assert found.layers[2].rope == Rope(1e6, 64, "linear", {"factor": 8.0})
    assert (found.attention_scale, found.embedding_scale, found.norm_offset) == (1 / 16, 16.0, 1.0)
    assert (found.tied, found.has_after_norms, found.activation) == (True, True, "gelu_tanh")


def test_gpt_oss() -> None:
    found = plan("GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=128)
    assert [layer.window for layer in found.layers] == [128, None] * 3
    assert (found.has_sinks, found.has_qkv_bias, found.activation) == (True, True, "swiglu_clamp")
    with pytest.raises(ModelRefused, match="swiglu_limit is 5"):
        plan("GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, swiglu_limit=5.0)


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("PhiForCausalLM", {}, "is not one of Gemma3ForCausalLM"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "activation 'relu'"),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        (
            "GptOssForCausalLM",
            {"quantization_config": AWQ, "num_local_experts": 4, "num_experts_per_tok": 2},
            "experts in one tensor are read unquantized",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "proportional"}, "rope_theta": 1e4}, "'proportional'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "looks ahead"),
        ("Gemma3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "1 layer_types for 6 layers"),
    ],
)
def test_what_is_not_computed_here_is_refused_with_the_reason(architecture: str, config, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        plan(architecture, **config)
