"""Rotation tables by the rules of transformers, in the same float32 operations.

A frequency that differs in its last bit turns a head by 5e-4 radians at position 8,000, which shows in the logits; so
the order of operations here is that of `transformers.modeling_rope_utils`, and a test compares bits. (`arch.py` gives
the same angles in float64, to be read by people.)
"""

import math

import torch
from torch import Tensor

from workers.model.arch import Rope
from workers.ops.weights import RopeTable


def make_rope_table(rope: Rope, max_positions: int, device: torch.device | str = "cpu") -> RopeTable:
    """Cosines and sines of positions 0 to max_positions - 1. The kind is one that `families.py` lets through."""
    frequency_R, factor = make_frequencies(rope)
    angle_LR = torch.arange(max_positions).float()[:, None] * frequency_R
    return RopeTable((angle_LR.cos() * factor).to(device), (angle_LR.sin() * factor).to(device))


def make_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """(radians per position of each pair, float32, `rope.dim // 2` of them; factor of cosines and sines)."""
    wave_R = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    plain_R = 1.0 / wave_R
    match rope.kind:
        case "default":
            return plain_R, 1.0
        case "linear":
            return plain_R / rope.scaling["factor"], 1.0
        case "llama3":
            return _scale_llama3(plain_R, rope), 1.0
        case "yarn":
            return _scale_yarn(wave_R, rope), _yarn_factor(rope)
    raise ValueError(f"rope {rope.kind!r} is not computed here; known: default, linear, llama3, yarn")


def _scale_llama3(plain_R: Tensor, rope: Rope) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, low, high = (rope.scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = rope.scaling["original_max_position_embeddings"]
    length_R = 2 * math.pi / plain_R
    scaled_R = torch.where(length_R > original / low, plain_R / factor, plain_R)
    share_R = (original / length_R - low) / (high - low)
    blended_R = (1 - share_R) * scaled_R / factor + share_R * scaled_R
    is_between_R = ~(length_R < original / high) & ~(length_R > original / low)
    return torch.where(is_between_R, blended_R, scaled_R)


def _scale_yarn(wave_R: Tensor, rope: Rope) -> Tensor:
    """Pairs that turn more than beta_fast times within the original context are kept, those below beta_slow slowed."""
    original = rope.scaling["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        return (rope.dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low = pair_with(rope.scaling.get("beta_fast") or 32)
    high = pair_with(rope.scaling.get("beta_slow") or 1)
    if rope.scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp_R = torch.clamp((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept_R = 1 - ramp_R
    return 1.0 / (rope.scaling["factor"] * wave_R) * (1 - kept_R) + 1.0 / wave_R * kept_R


def _yarn_factor(rope: Rope) -> float:
    given = rope.scaling.get("attention_factor")
    if given is not None:
        return given
    factor, one, all_dims = (rope.scaling.get(key, 0.0) for key in ("factor", "mscale", "mscale_all_dim"))
    if one and all_dims:
        return _magnitude(factor, one) / _magnitude(factor, all_dims)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
