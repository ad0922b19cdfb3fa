"""The oracle: transformers `generate`, greedy, fp32, with the top-2 margin of every step.

Equality of tokens means something only where the oracle itself is not tossing a coin: each step's margin between its
best and second logit is asserted to be >= MIN_MARGIN (two correct fp32 implementations differ by about 5e-5).
"""

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

MIN_MARGIN = 1e-3
NEW_TOKENS = 24
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 64, 65, 100, 129, 200, 256, 300, 333, 512, 777, 1000, 1500)
SLICE = (1, 17, 64, 129)
"""Those of `LENGTHS` that a slice runs."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Expected:
    """A prompt and what transformers answers."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    min_margin: float


@lru_cache(maxsize=1)
def load_oracle(model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True).eval()


@lru_cache(maxsize=4)
def load_tokenizer(model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, local_files_only=True)


@lru_cache(maxsize=256)
def expect(model_path: Path, prompt: tuple[int, ...], new_tokens: int = NEW_TOKENS) -> Expected:
    """What the oracle generates after `prompt`; asserts the margins and names the model when one is too small."""
    model = load_oracle(model_path)
    with torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=new_tokens, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    tokens = tuple(int(t) for t in result.sequences[0, len(prompt) :])
    margins = [float(two[0] - two[1]) for two in (step[0].float().topk(2).values for step in result.logits)]
    assert min(margins) >= MIN_MARGIN, (
        f"{model_path.name}, prompt of {len(prompt)}: margin {min(margins):.1e} is a coin toss"
    )
    return Expected(prompt, tokens, min(margins))


def make_prompts(model_path: Path, lengths: tuple[int, ...] = LENGTHS, seed: int = 4) -> list[tuple[int, ...]]:
    """Prompts of exactly these lengths, cut from the licence text at seeded places."""
    text = (ROOT / "LICENSE").read_text()
    ids = load_tokenizer(model_path)(text)["input_ids"]
    rng = random.Random(seed)
    return [tuple(ids[start : start + n]) for n in lengths for start in [rng.randrange(0, len(ids) - n)]]
