"""How the linears of a checkpoint are quantized, from `quantization_config` of its config.json. Pure; no torch.

Only weights count. What a scheme says about activations (static or dynamic scales, `input_scale`) or the KV cache is
not followed: Baton's weight mode and KV dtype decide those, and keep as many bits or more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.errors import ModelRefused

_GPTQ_FORMATS = {"gptq": True, "gptq_v2": False}
"""Whether it stores zero - 1."""
_METHODS = "awq, compressed-tensors, fp8, gptq"
_PACKED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class GPTQ:
    bits: int
    group_size: int | None
    """None: a row is a group."""
    is_v1: bool
    has_act_order: bool


@dataclass(frozen=True, slots=True)
class AWQ:
    group_size: int | None


@dataclass(frozen=True, slots=True)
class PackedInts:
    """compressed-tensors, "pack-quantized"."""

    bits: int
    group_size: int | None
    is_symmetric: bool
    has_act_order: bool


@dataclass(frozen=True, slots=True)
class Int8:
    """compressed-tensors, "int-quantized"."""

    group_size: int | None
    has_one_scale: bool
    """Of the whole matrix."""
    is_symmetric: bool


@dataclass(frozen=True, slots=True)
class FP8:
    scale_names: tuple[str, ...]
    """What the scale's tensor may be called, beside the weight's."""
    block: tuple[int | None, int | None]
    """Rows and columns that share a scale; None: all."""


Scheme = GPTQ | AWQ | PackedInts | Int8 | FP8


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a parsed config.json, None where weights are as they are.

    Raises `ModelRefused` with the name of what is not read.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelRefused("quantization_config is no object")
    match found.get("quant_method"):
        case "gptq":
            return _read_gptq(found)
        case "awq":
            return _read_awq(found)
        case "compressed-tensors":
            return _read_compressed(found)
        case "fp8":
            return _read_fp8(found)
    raise ModelRefused(f"quantization_config: quant_method {found.get('quant_method')!r} is not one of {_METHODS}")


def _read_gptq(found: Mapping[str, Any]) -> GPTQ:
    form = found.get("checkpoint_format") or found.get("format") or "gptq"
    _demand("gptq", form in _GPTQ_FORMATS, "checkpoint_format", form, "gptq or gptq_v2")
    _demand("gptq", not found.get("is_marlin_format"), "is_marlin_format", True, "false")
    _demand("gptq", found.get("bits") in _PACKED_BITS, "bits", found.get("bits"), "4 or 8")
    _demand("gptq", not found.get("dynamic"), "dynamic", found.get("dynamic"), "the same for every module")
    pack = found.get("pack_dtype") or "int32"
    _demand("gptq", pack == "int32", "pack_dtype", pack, "int32")
    size = _group_size("gptq", found.get("group_size"))
    return GPTQ(found["bits"], size, _GPTQ_FORMATS[form], bool(found.get("desc_act")))


def _read_awq(found: Mapping[str, Any]) -> AWQ:
    bits, version = found.get("bits", found.get("w_bit")), str(found.get("version") or "gemm").lower()
    _demand("awq", bits == 4, "bits", bits, "4")
    _demand("awq", version == "gemm", "version", version, "gemm")
    _demand("awq", found.get("zero_point", True) is True, "zero_point", found.get("zero_point"), "true")
    return AWQ(_group_size("awq", found.get("group_size", found.get("q_group_size"))))


def _read_fp8(found: Mapping[str, Any]) -> FP8:
    form = found.get("fmt") or "e4m3"
    _demand("fp8", form == "e4m3", "fmt", form, "e4m3")
    block = found.get("weight_block_size")
    if block is None:
        return FP8(("weight_scale", "weight_scale_inv"), (None, None))
    return FP8(("weight_scale_inv",), _block("fp8", "weight_block_size", block))


def _read_compressed(found: Mapping[str, Any]) -> Scheme:
    name = "compressed-tensors"
    status = found.get("quantization_status") or "compressed"
    _demand(name, status == "compressed", "quantization_status", status, "compressed")
    sparsity = (found.get("sparsity_config") or {}).get("format") or "dense"
    _demand(name, sparsity == "dense", "sparsity_config.format", sparsity, "dense")
    transform = (found.get("transform_config") or {}).get("config_groups") or None
    _demand(name, transform is None, "transform_config", transform, "absent: it turns activations")
    groups = list((found.get("config_groups") or {}).values())
    kinds = [(group.get("weights"), group.get("format") or found.get("format")) for group in groups]
    _demand(name, bool(kinds), "config_groups", {}, "given")
    _demand(name, all(kind == kinds[0] for kind in kinds), "config_groups", kinds, "the same for every module")
    weights, form = kinds[0]
    _demand(name, isinstance(weights, Mapping), "weights", weights, "quantized")
    _demand(name, not weights.get("dynamic"), "weights.dynamic", True, "false")
    match form:
        case "pack-quantized":
            return _read_packed(weights)
        case "int-quantized" | "float-quantized" | "naive-quantized":
            return _read_float8(weights) if weights.get("type") == "float" else _read_int8(weights)
    raise ModelRefused(_refusal(name, "format", form, "pack-quantized, int-quantized or float-quantized"))


def _read_packed(weights: Mapping[str, Any]) -> PackedInts:
    name, strategy, order = "pack-quantized", weights.get("strategy"), weights.get("actorder")
    kind = weights.get("type", "int")
    _demand(name, kind == "int", "type", kind, "int")
    _demand(name, weights.get("num_bits") in _PACKED_BITS, "num_bits", weights.get("num_bits"), "4 or 8")
    _demand(name, strategy in ("group", "channel"), "strategy", strategy, "group or channel")
    _demand(name, order in (None, False, True, "group", "weight", "static"), "actorder", order, "group or weight")
    return PackedInts(
        bits=weights["num_bits"],
        group_size=_group_size(name, weights.get("group_size")) if strategy == "group" else None,
        is_symmetric=bool(weights.get("symmetric", True)),
        has_act_order=order in (True, "group"),
    )


def _read_int8(weights: Mapping[str, Any]) -> Int8:
    name, strategy = "int-quantized", weights.get("strategy")
    _demand(name, weights.get("num_bits") == 8, "num_bits", weights.get("num_bits"), "8")
    _demand(name, strategy in ("channel", "tensor", "group"), "strategy", strategy, "channel, tensor or group")
    _demand(name, weights.get("actorder") != "group", "actorder", "group", "absent")
    size = _group_size(name, weights.get("group_size")) if strategy == "group" else None
    return Int8(size, strategy == "tensor", bool(weights.get("symmetric", True)))


def _read_float8(weights: Mapping[str, Any]) -> FP8:
    name, strategy = "float-quantized", weights.get("strategy")
    _demand(name, weights.get("num_bits") == 8, "num_bits", weights.get("num_bits"), "8")
    _demand(name, bool(weights.get("symmetric", True)), "symmetric", False, "true")
    blocks: dict[Any, tuple[int | None, int | None]] = {"tensor": (None, None), "channel": (1, None)}
    if strategy == "block":
        given = weights.get("block_structure")
        given = [int(x) for x in given.split("x")] if isinstance(given, str) and given.count("x") == 1 else given
        return FP8(("weight_scale",), _block(name, "block_structure", given))
    _demand(name, strategy in blocks, "strategy", strategy, "tensor, channel or block")
    return FP8(("weight_scale",), blocks[strategy])


def _group_size(method: str, given: Any) -> int | None:
    is_size = type(given) is int and (given == -1 or given > 0)
    _demand(method, is_size, "group_size", given, "a number of inputs, or -1 for all")
    return None if given == -1 else int(given)


def _block(method: str, key: str, given: Any) -> tuple[int, int]:
    is_block = isinstance(given, list | tuple) and len(given) == 2 and all(type(x) is int and x > 0 for x in given)
    _demand(method, is_block, key, given, "two sizes")
    return given[0], given[1]


def _demand(method: str, holds: bool, key: str, found: Any, read: str) -> None:
    if not holds:
        raise ModelRefused(_refusal(method, key, found, read))


def _refusal(method: str, key: str, found: Any, read: str) -> str:
    return f"quantization_config: {method} with {key} {found!r} is not read; {key} must be {read}"
