"""Tiny random models of every family that Baton serves, and what transformers `generate` answers with them.

Seeds are those whose oracle tosses no coin: its margins are asserted where its answers are made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.oracle import Expected, expect
from tests.support.tiny_models import save_tiny

LENGTHS = (1, 2, 3, 5, 7, 8, 11, 16, 17, 23, 31, 40, 47, 61, 77, 90)
SHORT_LENGTHS = (1, 7, 16, 31, 61, 90)
"""Those of `LENGTHS` that a slice runs."""
NEW_TOKENS = 16
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of `tiny_models` and what its config says differently."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


OURS: dict[str, Family] = {
    "llama": Family("llama"),
    "llama3": Family(
        "llama",
        {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        seed=1,
    ),
    "mistral": Family("mistral"),
    "qwen2": Family("qwen2"),
    "qwen2-windows": Family("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": Family("qwen3"),
    "gemma3": Family("gemma3_text", {"rope_parameters": GEMMA3_ROPES, "final_logit_softcapping": 30.0}),
    "mixtral": Family("mixtral", {"sliding_window": 24}),
    "qwen3-moe": Family(
        "qwen3_moe",
        {
            "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        seed=1,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED, "sliding_window": 16,
            "rope_parameters": YARN,
        },
    ),
}  # fmt: skip
"""What `workers/model/families.py` knows."""

FOREIGN: dict[str, Family] = {
    "gpt2": Family("gpt2", seed=1),  # learned positions
    "opt": Family("opt"),  # learned positions, moved by two
    "ctrl": Family("ctrl", {"tie_word_embeddings": False}, seed=2),  # sinusoidal positions
}
"""What only the transformers classes compute."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {}, r"BloomForCausalLM: .*ALiBi"),
    "mpt": ("mpt", {}, r"MptForCausalLM: .*ALiBi"),
    "falcon-alibi": ("falcon", {"alibi": True}, r"FalconForCausalLM has alibi=True"),
    "xglm": ("xglm", {}, r"XGLMForCausalLM does not ask attention once per layer"),
    "gpt-neo": ("gpt_neo", {}, r"the attention of its classes cannot be replaced"),
}
"""kind, changes, and the reason that is told at start-up."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model folder and the oracle's answers."""

    name: str
    folder: Path
    expected: tuple[Expected, ...]

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [each.prompt for each in self.expected]

    @property
    def answers(self) -> list[list[int]]:
        return [list(each.tokens) for each in self.expected]

    @property
    def new_tokens(self) -> int:
        return len(self.expected[0].tokens)

    def up_to(self, num_tokens: int) -> "Case":
        """With the prompts of at most so many tokens."""
        return Case(self.name, self.folder, tuple(e for e in self.expected if len(e.prompt) <= num_tokens))


def make_case(name: str, folder: Path, lengths: Sequence[int] = LENGTHS) -> Case:
    """Writes the family's model to `folder` and asks the oracle, which must not always say the same."""
    family = (OURS | FOREIGN)[name]
    save_tiny(family.kind, folder, family.seed, jitter=0.2, eos_token_id=None, **family.changes)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    expected = tuple(expect(folder, prompt, NEW_TOKENS) for prompt in prompts if len(prompt) in lengths)
    assert len({token for each in expected for token in each.tokens}) >= 3 * len(expected), f"{name} says little"
    return Case(name, folder, expected)
