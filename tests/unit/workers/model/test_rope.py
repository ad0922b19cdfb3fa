"""Rotation tables are those of transformers, bit for bit."""

import pytest
import torch

from workers.model.arch import make_rope
from workers.model.rope import make_frequencies, make_rope_table

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
CASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-gpt-oss": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn-given": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", sorted(CASES))
def test_frequencies_equal_those_of_transformers(name: str, head_dim: int, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = CASES[name] | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=131072,
        rope_parameters=parameters,
    )  # fmt: skip
    compute = ROPE_INIT_FUNCTIONS.get(parameters["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected_R, factor = compute(config)
    rope = make_rope({"rope_parameters": parameters}, head_dim)
    found_R, found_factor = make_frequencies(rope)
    assert torch.equal(found_R, expected_R)
    assert found_factor == factor


def test_a_table_equals_the_embedding_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = LLAMA3 | {"rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(9000)[None])
    table = make_rope_table(make_rope({"rope_parameters": parameters}, 64), 9000)
    assert table.max_positions == 9000
    assert torch.equal(table.cos_LR, cos[0, :, :32])
    assert torch.equal(table.sin_LR, sin[0, :, :32])


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="longrope"):
        make_frequencies(make_rope({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, 64))
