"""What the families of decoders that Baton computes itself do differently, from config.json to a plan. Pure; no torch.

A family is a set of switches of one decoder (`decoder.py`) and the names of its tensors (`build.py`). What is not here
runs through the transformers classes (`fallback.py`). Defaults are those of transformers 5, for configs that leave
them out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workers.errors import ModelRefused
from workers.model.arch import DecoderSpec, Rope, make_rope, make_spec
from workers.model.scheme import read_scheme

Activation = Literal["silu", "gelu_tanh", "swiglu_clamp"]
ExpertsLayout = Literal["mixtral", "qwen3_moe", "gpt_oss"]
"""How a checkpoint names and lays out the experts of a layer."""

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPES = {"default", "linear", "llama3", "yarn"}
_DEFAULT_THETAS = {"MixtralForCausalLM": 1_000_000.0, "GptOssForCausalLM": 150_000.0}
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""The one clamped activation that the op set has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed MLP of a layer."""

    layout: ExpertsLayout
    num_experts: int
    top_k: int
    renormalize: bool
    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    window: int | None
    rope: Rope
    experts: Experts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """How one model is computed; with its `DecoderSpec` all that `build.py` needs."""

    layers: tuple[LayerPlan, ...]
    activation: Activation
    norm_eps: float
    attention_scale: float
    tied: bool
    """The head is the embedding."""
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    has_after_norms: bool = False
    """Gemma: a second norm after attention and after the MLP."""
    norm_offset: float = 0.0
    """Added to stored norm weights: 1 where a family stores w - 1."""
    embedding_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class _Reader:
    """A config.json in the hands of one family."""

    config: Mapping[str, Any]
    spec: DecoderSpec

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    def count(self, *names: str) -> int:
        for name in names:
            if type(self.config.get(name)) is int and self.config[name] > 0:
                return int(self.config[name])
        raise ModelRefused(f"{self.spec.architecture}: config.json gives no {names[0]}")

    def rope(self, default_theta: float) -> Rope:
        theta = {"rope_theta": default_theta} if self.config.get("rope_theta") is None else {}
        rope = make_rope({**self.config, **theta}, self.spec.head_dim)
        assert rope is not None, "a theta is given"
        return rope

    def windows(self, layer_types: list[str] | None) -> list[int | None]:
        """The window of each layer by its type; without types `sliding_window` holds for all of them."""
        window = self.config.get("sliding_window")
        types = layer_types or ["sliding_attention"] * self.spec.num_layers
        if len(types) != self.spec.num_layers:
            raise ModelRefused(f"{self.spec.architecture}: {len(types)} layer_types for {self.spec.num_layers} layers")
        return [window if kind == "sliding_attention" else None for kind in types]

    def plan(
        self, windows: Sequence[int | None], experts: Sequence[Experts | None] | None = None, **traits: Any
    ) -> DecoderPlan:
        """The plan with `traits` over what most families have in common."""
        rope = self.rope(_DEFAULT_THETAS.get(self.spec.architecture, 10_000.0))
        each = experts or [None] * self.spec.num_layers
        layers = tuple(LayerPlan(window=w, rope=rope, experts=e) for w, e in zip(windows, each, strict=True))
        return DecoderPlan(
            **{
                "layers": layers,
                "activation": _activation_of(self.config.get("hidden_act", "silu")),
                "norm_eps": self.spec.norm_eps or 1e-6,
                "attention_scale": self.spec.head_dim**-0.5,
                "tied": self.flag("tie_word_embeddings"),
            }
            | traits
        )


def plan_decoder(config: Mapping[str, Any]) -> DecoderPlan:
    """How to compute the model of a parsed config.json.

    Raises `ModelRefused` with the reason where `decoder.py` cannot. A model refused here may still run on the fallback,
    unless `make_spec` refuses it too.
    """
    spec = make_spec(config)
    known = _FAMILIES.get(spec.architecture)
    if known is None:
        raise ModelRefused(f"{spec.architecture} is not one of {', '.join(sorted(_FAMILIES))}")
    is_quantized = read_scheme(config) is not None
    plan = known(_Reader(config, spec))
    for layer in plan.layers:
        if is_quantized and layer.experts is not None and layer.experts.layout == "gpt_oss":
            raise ModelRefused(f"{spec.architecture}: experts in one tensor are read unquantized only")
        if layer.rope.kind not in _ROPES:
            raise ModelRefused(f"{spec.architecture}: rope {layer.rope.kind!r} is not computed here")
    return plan


def _activation_of(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ModelRefused(f"activation {name!r} is not one of {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _plan_llama(read: _Reader) -> DecoderPlan:
    bias = read.flag("attention_bias")
    return read.plan(
        [None] * read.spec.num_layers, has_qkv_bias=bias, has_out_bias=bias, has_mlp_bias=read.flag("mlp_bias")
    )


def _plan_mistral(read: _Reader) -> DecoderPlan:
    window = read.config.get("sliding_window", 4096)
    return read.plan([window] * read.spec.num_layers)


def _qwen_windows(read: _Reader) -> list[int | None]:
    if not read.flag("use_sliding_window"):
        return [None] * read.spec.num_layers
    types = read.config.get("layer_types")
    if types is None:
        first = read.config.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(read.spec.num_layers)]
    return read.windows(types)


def _plan_qwen2(read: _Reader) -> DecoderPlan:
    return read.plan(_qwen_windows(read), has_qkv_bias=True)


def _plan_qwen3(read: _Reader) -> DecoderPlan:
    bias = read.flag("attention_bias")
    return read.plan(_qwen_windows(read), has_qkv_bias=bias, has_out_bias=bias, has_qk_norm=True)


def _plan_qwen3_moe(read: _Reader) -> DecoderPlan:
    experts = Experts(
        layout="qwen3_moe",
        num_experts=read.count("num_local_experts", "num_experts"),
        top_k=read.count("num_experts_per_tok"),
        renormalize=read.flag("norm_topk_prob"),
        intermediate_size=read.count("moe_intermediate_size"),
    )
    step, dense = read.config.get("decoder_sparse_step") or 1, read.config.get("mlp_only_layers") or ()
    each = [None if i in dense or (i + 1) % step else experts for i in range(read.spec.num_layers)]
    windows = read.windows(None) if read.flag("use_sliding_window") else [None] * read.spec.num_layers
    bias = read.flag("attention_bias")
    return read.plan(windows, each, has_qkv_bias=bias, has_out_bias=bias, has_qk_norm=True)


def _plan_mixtral(read: _Reader) -> DecoderPlan:
    experts = Experts(
        layout="mixtral",
        num_experts=read.count("num_local_experts"),
        top_k=read.count("num_experts_per_tok"),
        renormalize=True,
        intermediate_size=read.spec.intermediate_size,
    )
    return read.plan(read.windows(None), [experts] * read.spec.num_layers)


def _plan_gpt_oss(read: _Reader) -> DecoderPlan:
    for name, value in _SWIGLU.items():
        if read.config.get(name, value) != value:
            raise ModelRefused(
                f"{read.spec.architecture}: {name} is {read.config[name]}, only {value} is computed here"
            )
    experts = Experts(
        layout="gpt_oss",
        num_experts=read.count("num_local_experts"),
        top_k=read.count("num_experts_per_tok"),
        renormalize=True,
        intermediate_size=read.spec.intermediate_size,
    )
    types = read.config.get("layer_types")
    if types is None:
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(read.spec.num_layers)]
    bias = read.flag("attention_bias", default=True)
    return read.plan(
        read.windows(types),
        [experts] * read.spec.num_layers,
        activation="swiglu_clamp",
        has_qkv_bias=bias,
        has_out_bias=bias,
        has_mlp_bias=True,
        has_sinks=True,
    )


def _plan_gemma3(read: _Reader) -> DecoderPlan:
    if read.flag("use_bidirectional_attention"):
        raise ModelRefused(f"{read.spec.architecture}: attention looks ahead (use_bidirectional_attention)")
    if read.flag("attention_bias"):
        raise ModelRefused(f"{read.spec.architecture}: attention_bias is not computed here")
    types = read.config.get("layer_types")
    if types is None:
        pattern = read.config.get("sliding_window_pattern") or read.config.get("_sliding_window_pattern") or 6
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(read.spec.num_layers)]
    ropes = {"full_attention": read.rope(1_000_000.0), "sliding_attention": _local_rope(read)}
    layers = tuple(
        LayerPlan(window=window, rope=ropes[kind], experts=None)
        for window, kind in zip(read.windows(types), types, strict=True)
    )
    return read.plan(
        [None] * len(layers),
        layers=layers,
        activation=_activation_of(read.config.get("hidden_activation") or "gelu_pytorch_tanh"),
        attention_scale=float(read.config.get("query_pre_attn_scalar") or 256) ** -0.5,
        tied=read.flag("tie_word_embeddings", default=True),
        has_qk_norm=True,
        has_after_norms=True,
        norm_offset=1.0,
        embedding_scale=math.sqrt(read.spec.hidden_size),
        softcap=read.config.get("final_logit_softcapping"),
    )


def _local_rope(read: _Reader) -> Rope:
    """Of sliding layers: never scaled in the older files, which have one number for it."""
    dim = read.spec.head_dim
    if (read.config.get("rope_parameters") or {}).get("sliding_attention"):
        rope = make_rope(read.config, dim, "sliding_attention")
        if rope is not None:
            return rope
    return Rope(float(read.config.get("rope_local_base_freq") or 10_000.0), dim, "default", {})


_FAMILIES = {
    "LlamaForCausalLM": _plan_llama,
    "MistralForCausalLM": _plan_mistral,
    "Qwen2ForCausalLM": _plan_qwen2,
    "Qwen3ForCausalLM": _plan_qwen3,
    "Qwen3MoeForCausalLM": _plan_qwen3_moe,
    "MixtralForCausalLM": _plan_mixtral,
    "Gemma3ForCausalLM": _plan_gemma3,
    "GptOssForCausalLM": _plan_gpt_oss,
}
