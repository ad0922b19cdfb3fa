"""Tiny random models of real architectures, saved as folders, with transformers as their oracle for nothing."""

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 211, "max_position_embeddings": 512,
    "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXTRAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 4},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}

OLDER = {"vocab_size": 211, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": OLDER | {"n_layer": 3, "n_head": 6, "n_embd": 96, "n_positions": 512, "initializer_range": 0.25},
    "opt": OLDER | {
        "num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 96, "ffn_dim": 128, "word_embed_proj_dim": 96,
        "max_position_embeddings": 512, "init_std": 0.25,
    },
    "ctrl": OLDER | {
        "n_layer": 3, "n_head": 6, "n_embd": 96, "dff": 128, "n_positions": 512, "initializer_range": 0.25,
    },
    "xglm": OLDER | {
        "num_layers": 3, "attention_heads": 6, "d_model": 96, "ffn_dim": 128, "max_position_embeddings": 512,
        "init_std": 0.25,
    },
    "bloom": OLDER | {"n_layer": 3, "n_head": 6, "hidden_size": 96},
    "mpt": OLDER | {"n_layers": 3, "n_heads": 6, "d_model": 96, "max_seq_len": 512},
    "gpt_neo": OLDER | {
        "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 6, "hidden_size": 96,
    },
    "falcon": OLDER | {"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 96},
}  # fmt: skip
"""Families that name their sizes in their own way."""

KINDS = sorted(EXTRAS | OWN_SIZES)


def save_tiny(kind: str, folder: Path, seed: int = 0, jitter: float = 0.0, **changes: Any) -> Any:
    """Write the model folder and return the transformers model, fp32.

    `jitter` moves norms, biases and sinks off the ones and zeros that they start as, so that each of them counts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **((OWN_SIZES.get(kind) or SIZES | EXTRAS.get(kind, {})) | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if jitter:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or "bias" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=jitter)
    model.save_pretrained(folder)
    return model
