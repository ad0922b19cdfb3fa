"""The facts of a model that stand in its config.json: sizes, heads, rope, and what Baton cannot serve. Pure; no torch.

Figures checked by tests: SmolLM2-135M holds 22.5 KiB of 16-bit KV cache per token, Llama-3-8B 128 KiB.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ModelDamaged, ModelRefused

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "attention_heads", "num_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
}
"""What older families call the same facts."""

_BATCH_BOUND_ROPES = {"dynamic", "longrope"}
_ATTENTION_EXTRAS = {
    "attn_logit_softcapping": "scores are capped",
    "kv_lora_rank": "the cache holds latents",
    "index_topk": "attention picks tokens by an index",
    "attention_chunk_size": "attention is cut in chunks",
    "is_encoder_decoder": "it has an encoder",
    "alibi": "positions are a bias on scores (ALiBi)",
}
_BIASED_BY_DISTANCE = {"BloomForCausalLM", "MptForCausalLM"}
"""They have ALiBi whether or not their config.json says so."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position: frequencies theta ** (-2i / dim), then `scaling`."""

    theta: float
    dim: int
    """Channels of a head that are rotated."""
    kind: str
    """"default", "linear", "llama3", or a name whose angles only transformers computes."""
    scaling: Mapping[str, float]
    """The numbers of the scaling rule."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The sizes of a decoder-only model."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest context the model was made for, in tokens."""
    norm_eps: float | None
    rope: Rope | None
    """None for models with learned or no positions."""

    def kv_bytes_per_token_and_layer(self, element_bytes: int) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * element_bytes

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return self.num_layers * self.kv_bytes_per_token_and_layer(element_bytes)


def read_spec(folder: Path) -> DecoderSpec:
    """The spec of a model folder; raises `ModelDamaged` without a readable config.json, else what `make_spec`
    raises."""
    return make_spec(read_config(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands; raises `ModelDamaged` where it is not a JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDamaged(f"{folder.name}: config.json cannot be read: {type(error).__name__}") from None
    if not isinstance(config, dict):
        raise ModelDamaged(f"{folder.name}: config.json is no JSON object")
    return config


def make_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a parsed config.json; raises `ModelRefused` naming what cannot be served or what it does not say."""
    _refuse_unknown(config)
    architecture = config["architectures"][0]
    found = dict(config)
    for name, aliases in _ALIASES.items():
        if found.get(name) is None:
            found[name] = next((found[alias] for alias in aliases if found.get(alias)), None)
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
    for name in sizes:
        if type(found.get(name)) is not int or found[name] < 1:
            raise ModelRefused(f"{architecture}: config.json gives no {name}, which a decoder with attention has")
    heads = found["num_attention_heads"]
    head_dim = found.get("head_dim") or found["hidden_size"] // heads
    return DecoderSpec(
        architecture=architecture,
        num_layers=found["num_hidden_layers"],
        hidden_size=found["hidden_size"],
        intermediate_size=found["intermediate_size"] or 4 * found["hidden_size"],
        num_heads=heads,
        num_kv_heads=found.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=found["vocab_size"],
        max_positions=found["max_position_embeddings"],
        norm_eps=found.get("rms_norm_eps", found.get("layer_norm_eps", found.get("layer_norm_epsilon"))),
        rope=make_rope(found, head_dim),
    )


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if not architectures or not str(architectures[0]).endswith(("ForCausalLM", "LMHeadModel")):
        raise ModelRefused(
            f"{architectures or 'a model without architectures'} is not a decoder-only language model (...ForCausalLM)"
        )
    if architectures[0] in _BIASED_BY_DISTANCE:
        raise ModelRefused(f"{architectures[0]}: {_ATTENTION_EXTRAS['alibi']}, which Baton does not serve yet")
    for key, why in _ATTENTION_EXTRAS.items():
        if config.get(key):
            raise ModelRefused(f"{architectures[0]} has {key}={config[key]!r}: {why}, which Baton does not serve yet")
    unknown = sorted(set(config.get("layer_types") or ()) - _SERVED_LAYERS)
    rope = make_rope(config, 1)
    if rope is not None and rope.kind in _BATCH_BOUND_ROPES:
        raise ModelRefused(
            f"{architectures[0]} has rope {rope.kind!r}, whose angles depend on the longest request of a batch"
        )
    if unknown:
        raise ModelRefused(
            f"{architectures[0]} has layers of type {', '.join(unknown)}, which Baton does not serve yet"
        )


def make_rope(config: Mapping[str, Any], head_dim: int, kind: str = "full_attention") -> Rope | None:
    """The rope of layers of `kind`, None where the config gives no theta.

    transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`.
    """
    found = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    found = found.get(kind, found)  # some families have one rope per kind of layer
    theta = found.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        return None
    rule = str(found.get("rope_type", found.get("type", "default")))
    share = float(found.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    numbers = {
        key: float(value)
        for key, value in sorted(found.items())
        if isinstance(value, int | float) and key != "rope_theta"
    }
    return Rope(float(theta), int(head_dim * share), rule, numbers)


def plan_frequencies(rope: Rope) -> tuple[float, ...] | None:
    """Radians per position of each rotated pair, `rope.dim // 2` of them; None for a kind that is not computed here."""
    plain = [rope.theta ** (-2 * i / rope.dim) for i in range(rope.dim // 2)]
    match rope.kind:
        case "default":
            return tuple(plain)
        case "linear":
            return tuple(frequency / rope.scaling["factor"] for frequency in plain)
        case "llama3":
            return tuple(_scale_llama3(frequency, rope.scaling) for frequency in plain)
    return None


def _scale_llama3(frequency: float, scaling: Mapping[str, float]) -> float:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (share + (1 - share) / factor)


def rotation_angles(rope: Rope, position: int) -> tuple[float, ...] | None:
    """Angles in radians, unreduced, by which each channel pair of a head turns at `position`; None as
    `plan_frequencies`.
    """
    frequencies = plan_frequencies(rope)
    return None if frequencies is None else tuple(position * frequency for frequency in frequencies)


def describe_spec(spec: DecoderSpec, element_bytes: int, num_tokens: int, position: int) -> dict[str, Any]:
    """JSON-able facts for `baton explain`: the embedding of `num_tokens` tokens, rope at `position`, and the KV
    cache."""
    rope: dict[str, Any] | None = None
    if spec.rope is not None:
        angles = rotation_angles(spec.rope, position)
        rope = {
            "kind": spec.rope.kind,
            "theta": spec.rope.theta,
            "scaling": dict(spec.rope.scaling),
            "position": position,
            "angles": None if angles is None else list(angles),
        }
    return {
        "architecture": spec.architecture,
        "embedding_shape": [num_tokens, spec.hidden_size],
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_positions": spec.max_positions,
        "kv_bytes_per_token_and_layer": spec.kv_bytes_per_token_and_layer(element_bytes),
        "kv_bytes_per_token": spec.kv_bytes_per_token(element_bytes),
        "rope": rope,
    }
