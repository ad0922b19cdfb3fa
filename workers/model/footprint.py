"""What a model takes of memory: its weights in so many bits, and what requests keep of the tokens they computed. Pure.

The figures of public models that tests hold it to: 7 billion weights are 28, 14, 7 and 3.5 GB in 32, 16, 8 and 4 bits;
Llama-3-8B keeps 128 KiB a token, SmolLM2-135M 22.5 KiB; DeepSeek-V4-Pro 9.625 GiB of a context of 1 Mi tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from workers.engine.state import StateSpec, plan_groups
from workers.pages import blocks_to_hold, count_pages

MODE_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0, "q4": 5.0}
"""Bits of one weight of a linear layer: q4 has a 16-bit scale and minimum per 32 beside its 4 bits."""
HEAD_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0, "q4": 8.5}
"""Of the LM head. A tied embedding is the same matrix; an own one is 16 bits below fp32."""


def weight_bytes(num_weights: int, bits: float) -> int:
    return int(num_weights * bits / 8)


def model_bytes(num_weights: int, num_vocabulary_weights: int, mode: str, *, is_tied: bool) -> int:
    """Bytes of a whole model; `num_vocabulary_weights`: of the embedding, and as many again of an own head."""
    num_linear = num_weights - num_vocabulary_weights * (1 if is_tied else 2)
    head = weight_bytes(num_vocabulary_weights, HEAD_BITS[mode])
    own_embedding = 0 if is_tied else weight_bytes(num_vocabulary_weights, 32 if mode == "fp32" else 16)
    return weight_bytes(num_linear, MODE_BITS[mode]) + head + own_embedding


def state_bytes(spec: StateSpec, num_tokens: int) -> int:
    """Bytes of one layer's state after `num_tokens` tokens of one request, whole entries only."""
    if spec.kind == "fixed":
        return spec.entry_bytes
    seen = num_tokens if spec.window is None else min(num_tokens, spec.window)
    return seen // spec.tokens_per_entry * spec.entry_bytes


def request_bytes(specs: Sequence[StateSpec], num_tokens: int) -> int:
    """Bytes of all layers' state after `num_tokens` tokens of one request, blocks apart."""
    return sum(state_bytes(spec, num_tokens) for spec in specs)


class Paging(NamedTuple):
    """What a pool is made of."""

    block_bytes: int
    blocks_per_context: int
    """Blocks that one request of the longest context holds at most."""


def plan_paging(state: Sequence[StateSpec], block_tokens: int, context_tokens: int, chunk_tokens: int) -> Paging:
    """For layers that keep `state`. Raises `ModelRefused` for state that is not served."""
    groups = plan_groups(state)
    windows = [group.spec.window for group in groups]
    block_bytes = max(len(group.layers) for group in groups) * state[0].entry_bytes * block_tokens
    num_pages = count_pages(context_tokens, block_tokens)
    return Paging(block_bytes, blocks_to_hold(num_pages, windows, block_tokens, chunk_tokens))


def count_weights(folder: Path) -> int:
    """Numbers in the folder's safetensors, by their headers. Raises ValueError for a file that is none."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= 100 << 20 else None
        if not isinstance(header, dict):
            raise ValueError(f"{path.name} has no header of safetensors")
        for name, facts in header.items():
            if name != "__metadata__":
                count = 1
                for edge in facts["shape"]:
                    count *= edge
                total += count
    return total
