"""Writers of quantized checkpoints, by the published layouts and sharing no code with the readers.

Each makes a matrix of random grid numbers: what a file holds of it, and the float32 values that those stand for.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_models import save_tiny

Stored = dict[str, Tensor]
"""By what follows the name of the module."""


class Layout(NamedTuple):
    config: dict[str, Any]
    """`quantization_config`."""
    write: Callable[[np.random.Generator, int, int], tuple[Stored, Tensor]]
    """(numbers, rows, inputs) to (what is stored, `[rows, inputs]` float32)."""
    fits_q4: bool = False
    fits_int8: bool = False


def pack(numbers: Any, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """`[A, B]` numbers as `[A, B * bits / 32]` int32 words, the first lowest; `order[i]` is the i-th of each word."""
    per_word = 32 // bits
    order = order or range(per_word)
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word))).astype(np.uint32)
    words = np.zeros((len(padded), padded.shape[1] // per_word), np.uint32)
    for w in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, w] |= padded[:, w * per_word + place] << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32))


class Grid(NamedTuple):
    q_NK: Any
    scale_NS: Tensor
    """float16 or bfloat16."""
    zero_NS: Any
    group_of_K: Any

    def values(self) -> Tensor:
        q, zero = torch.from_numpy(self.q_NK).float(), torch.from_numpy(self.zero_NS).float()
        columns = [(q[:, k] - zero[:, g]) * self.scale_NS[:, g].float() for k, g in enumerate(self.group_of_K.tolist())]
        return torch.stack(columns, dim=1)


def make_grid(
    rng: np.random.Generator, rows: int, width: int, bits: int, size: int | None, dtype: torch.dtype = torch.float16,
    is_symmetric: bool = False, is_shuffled: bool = False,
) -> Grid:  # fmt: skip
    """Unsigned numbers; every zero point from the least to the largest occurs."""
    num_groups = width // size if size else 1
    scale = torch.from_numpy(rng.uniform(0.2, 1.0, (rows, num_groups)) * 2.0 ** (1 - bits)).to(dtype)
    zero = np.full((rows, num_groups), 1 << (bits - 1))
    if not is_symmetric:
        zero = rng.integers(0, 1 << bits, (rows, num_groups))
    groups = np.arange(width) * num_groups // width
    if is_shuffled:
        rng.shuffle(groups)
    return Grid(rng.integers(0, 1 << bits, (rows, width)), scale, zero, groups)


def gptq(bits: int = 4, size: int | None = 32, version: int = 1, act_order: bool = False) -> Layout:
    """`qweight` along K, `qzeros` along N; version 1 takes one off each zero, in whole words."""

    def write(rng: np.random.Generator, rows: int, width: int) -> tuple[Stored, Tensor]:
        grid = make_grid(rng, rows, width, bits, size, is_shuffled=act_order)
        zeros = pack(grid.zero_NS.T, bits).numpy().view(np.uint32)
        if version == 1:
            ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
            with np.errstate(over="ignore"):
                zeros = zeros - ones
        stored = {
            "qweight": _pack_down(grid.q_NK, bits),
            "qzeros": torch.from_numpy(zeros.view(np.int32).copy()),
            "scales": grid.scale_NS.T.contiguous(),
            "g_idx": torch.from_numpy(grid.group_of_K.astype(np.int32)),
        }
        return stored, grid.values()

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size or -1, "desc_act": act_order, "sym": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip
    fits = bits == 4 and not act_order
    return Layout(config, write, fits_q4=fits, fits_int8=bits == 4 and size is None)


def _pack_down(q_NK: Any, bits: int) -> Tensor:
    """GPTQ's weights: word i of column n holds inputs 8 i to 8 i + 7 of row n."""
    per_word = 32 // bits
    words = np.zeros((q_NK.shape[1] // per_word, q_NK.shape[0]), np.uint32)
    for k in range(q_NK.shape[1]):
        words[k // per_word] |= q_NK[:, k].astype(np.uint32) << np.uint32(bits * (k % per_word))
    return torch.from_numpy(words.view(np.int32))


def awq(size: int | None = 64) -> Layout:
    def write(rng: np.random.Generator, rows: int, width: int) -> tuple[Stored, Tensor]:
        grid = make_grid(rng, rows, width, 4, size)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        stored = {
            "qweight": pack(grid.q_NK.T, 4, order),
            "qzeros": pack(grid.zero_NS.T, 4, order),
            "scales": grid.scale_NS.T.contiguous(),
        }
        return stored, grid.values()

    config = {"quant_method": "awq", "bits": 4, "group_size": size or -1, "version": "gemm", "zero_point": True}
    return Layout(config, write, fits_q4=True, fits_int8=size is None)


def packed(bits: int = 4, size: int | None = 32, is_symmetric: bool = True, act_order: bool = False) -> Layout:
    """compressed-tensors' "pack-quantized"; its scales in bfloat16."""

    def write(rng: np.random.Generator, rows: int, width: int) -> tuple[Stored, Tensor]:
        grid = make_grid(rng, rows, width, bits, size, torch.bfloat16, is_symmetric, act_order)
        stored = {
            "weight_packed": pack(grid.q_NK, bits),
            "weight_scale": grid.scale_NS,
            "weight_shape": torch.tensor([rows, width]),
        }
        if not is_symmetric:
            stored["weight_zero_point"] = pack(grid.zero_NS.T, bits).T.contiguous()
        if act_order:
            stored["weight_g_idx"] = torch.from_numpy(grid.group_of_K.astype(np.int32))
        return stored, grid.values()

    weights = {
        "num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": "group" if size else "channel",
        "group_size": size, "actorder": "group" if act_order else None, "dynamic": False,
    }  # fmt: skip
    fits_int8 = size in (None, 128) and (bits == 4 or is_symmetric)  # the matrices asked for are 128 wide
    return Layout(_compressed("pack-quantized", weights), write, bits == 4 and not act_order, fits_int8)


def int8(strategy: str = "channel", is_symmetric: bool = True) -> Layout:
    """compressed-tensors' W8A8, the dynamic scheme of its activations included."""

    def write(rng: np.random.Generator, rows: int, width: int) -> tuple[Stored, Tensor]:
        q = torch.from_numpy(rng.integers(-128, 128, (rows, width)).astype(np.int8))
        scale = torch.from_numpy(rng.uniform(0.2, 1.0, (1 if strategy == "tensor" else rows, 1)) / 128)
        stored = {"weight": q, "weight_scale": scale.to(torch.bfloat16)}
        zero = torch.zeros(scale.shape)
        if not is_symmetric:
            stored["weight_zero_point"] = torch.from_numpy(rng.integers(-128, 128, scale.shape).astype(np.int8))
            zero = stored["weight_zero_point"].float()
        values = (q.float() - zero) * stored["weight_scale"].float()
        if strategy == "tensor":
            stored = {name: x.reshape(1) if "weight_" in name else x for name, x in stored.items()}
        return stored, values

    weights = {"num_bits": 8, "type": "int", "symmetric": is_symmetric, "strategy": strategy, "dynamic": False}
    config = _compressed("int-quantized", weights)
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
    }  # fmt: skip
    return Layout(config, write, fits_int8=is_symmetric)


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


def fp8(strategy: str, block: tuple[int, int] = (128, 128)) -> Layout:
    """`strategy` "deepseek": quant_method fp8 with `weight_scale_inv`; else compressed-tensors' own."""

    def write(rng: np.random.Generator, rows: int, width: int) -> tuple[Stored, Tensor]:
        q = torch.from_numpy(rng.normal(0, 60, (rows, width)).clip(-448, 448)).to(torch.float8_e4m3fn)
        shape = {"tensor": (1, 1), "channel": (rows, 1)}.get(
            strategy, ((rows + block[0] - 1) // block[0], (width + block[1] - 1) // block[1])
        )
        scale = torch.from_numpy(rng.uniform(0.001, 0.004, shape)).float()
        tall = {"tensor": rows, "channel": 1}.get(strategy, block[0])
        wide = block[1] if strategy in ("block", "deepseek") else width
        values = q.float().clone()
        for n in range(0, rows, tall):
            for k in range(0, width, wide):
                values[n : n + tall, k : k + wide] *= scale[n // tall, k // wide]
        name = "weight_scale_inv" if strategy == "deepseek" else "weight_scale"
        return {"weight": q, name: scale.reshape(1) if strategy == "tensor" else scale}, values

    if strategy == "deepseek":
        size = list(block)
        return Layout(
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": size, "activation_scheme": "dynamic"}, write
        )
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(block)
    return Layout(_compressed("float-quantized", weights), write)


LAYOUTS = {
    "gptq v1, groups of 32": gptq(),
    "gptq v2, groups of 64": gptq(size=64, version=2),
    "gptq v1, act-order": gptq(act_order=True),
    "gptq v2, a group a row": gptq(size=None, version=2),
    "gptq v1, 8 bits": gptq(bits=8),
    "awq, groups of 64": awq(),
    "awq, a group a row": awq(size=None),
    "int4 packed, groups of 128": packed(size=128),
    "int4 packed, zero points": packed(is_symmetric=False),
    "int4 packed, act-order": packed(act_order=True),
    "int8 packed per channel": packed(bits=8, size=None),
    "int8 per channel": int8(),
    "int8 per channel, zero points": int8(is_symmetric=False),
    "int8 per tensor": int8("tensor"),
    "fp8 per tensor": fp8("tensor"),
    "fp8 per channel": fp8("channel"),
    "fp8 in blocks of compressed-tensors": fp8("block", (64, 32)),
    "fp8 in blocks of 128": fp8("deepseek"),
}


def save_quantized(layout: Layout, folder: Path, dense: Path, seed: int = 0) -> None:
    """A tiny llama of the layout in `folder`, and in `dense` the float32 model of the same values.

    K and V have 32 rows: blocks of 128 are cut at the edge. Layer 1's down_proj is left as it was.
    """
    sizes = {
        "hidden_size": 128,
        "head_dim": 16,
        "num_attention_heads": 8,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
    }
    save_tiny("llama", dense, seed, jitter=0.1, **sizes)
    tensors = load_file(dense / "model.safetensors")
    rng = np.random.default_rng(seed)
    stored: Stored = {}
    for name, weight in sorted(tensors.items()):
        if not name.endswith("_proj.weight") or "layers.1.mlp.down" in name:
            stored[name] = weight
            continue
        parts, tensors[name] = layout.write(rng, *weight.shape)
        stored |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir(exist_ok=True)
    for path in dense.glob("*.json"):
        shutil.copy(path, folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
