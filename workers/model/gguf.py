"""A GGUF file to a folder that transformers and Baton load: weights, config, tokenizer and chat template.

Knows the GGUF names of the llama family with a byte-level BPE tokenizer. Refuses everything else by name. Knows no
torch. The stored dtype is float32: a dequantized 4-bit weight is `scale * q + min` with float16 scale and min, which
needs more bits than bfloat16 and float16 have, so float32 is the smallest dtype in which the conversion is exact.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.errors import ModelDamaged, ModelRefused
from workers.model.progress import Progress, ignore_progress

FORMAT = "baton-gguf-1"
"""Changes when a folder written by an older converter must be made again."""

_PRE_TOKENIZERS = {"smollm": True, "gpt-2": False, "default": False}
"""`tokenizer.ggml.pre` -> are digits split one by one before the byte-level rule?"""

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SPECIAL = 3
"""`tokenizer.ggml.token_type` of control tokens."""

Fields = Mapping[str, Any]
Weight = npt.NDArray[np.float32]


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Progress = ignore_progress) -> None:
    """Make `out_dir` a model folder equal to the GGUF file; it appears whole or not at all.

    A folder that is already there and complete is left as it is. Two processes may convert into the same folder at
    once: the first to finish wins. Raises `ModelRefused` for an architecture or tokenizer that is not known,
    `ModelDamaged` for a file that is no GGUF, and OSError where the disk fails; the partial folder is removed then.
    """
    if is_converted(out_dir):
        return
    _sweep_partials(out_dir)
    partial = out_dir.with_name(f"{out_dir.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        _write_folder(gguf_path, partial, progress)
        try:
            partial.rename(out_dir)
        except OSError:
            if not is_converted(out_dir):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_converted(folder: Path) -> bool:
    """Whether `folder` is a finished conversion by this version of the converter."""
    try:
        manifest = json.loads((folder / "baton.json").read_text())
        return bool(
            manifest["format"] == FORMAT and (folder / "model.safetensors").stat().st_size == manifest["weights_bytes"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _sweep_partials(out_dir: Path) -> None:
    """Remove what conversions that were killed have left."""
    for partial in out_dir.parent.glob(f"{out_dir.name}.partial-*"):
        pid = int(partial.name.rpartition("-")[2])
        try:
            os.kill(pid, 0)
            alive = pid != os.getpid()
        except ProcessLookupError:
            alive = False
        except PermissionError:
            alive = True
        if not alive:
            shutil.rmtree(partial, ignore_errors=True)


def _write_folder(gguf_path: Path, folder: Path, progress: Progress) -> None:
    from gguf import GGUFReader  # two seconds that only a conversion pays

    progress("reading", 0.0)
    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelDamaged(f"{gguf_path.name} is not a whole GGUF file: {error}") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = plan_config(fields, has_lm_head=any(t.name == "output.weight" for t in reader.tensors))
    except KeyError as error:
        raise ModelDamaged(f"{gguf_path.name} lacks the field {error}") from None
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _plan_generation_config(config))
    _write_tokenizer(fields, folder)
    weights_bytes = _write_weights(reader.tensors, config, folder / "model.safetensors", progress)
    manifest = {
        "format": FORMAT,
        "source": gguf_path.name,
        "source_bytes": gguf_path.stat().st_size,
        "weights_bytes": weights_bytes,
    }
    _write_json(folder / "baton.json", manifest)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- config -----------------------------------------------------------------------------------------------------------


def plan_config(fields: Fields, has_lm_head: bool) -> dict[str, Any]:
    """The Hugging Face config.json of a GGUF header; raises `ModelRefused` for an architecture other than llama."""
    arch = fields.get("general.architecture")
    if arch != "llama":
        raise ModelRefused(f"GGUF architecture {arch!r} is not known; known: 'llama'")
    for key in fields:
        if key.startswith("llama.rope.scaling") or key in ("llama.expert_count", "llama.attention.sliding_window"):
            raise ModelRefused(f"GGUF field {key!r} is not supported")
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", width // heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not has_lm_head,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: float) -> float:
    """The decimal that a float32 was written from: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _plan_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}


# --- tokenizer --------------------------------------------------------------------------------------------------------


def make_tokenizer(fields: Fields) -> Any:
    """The `tokenizers.Tokenizer` of a GGUF header with its own pre-tokenizer rule (transformers forgets `smollm`'s)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # conversion only

    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(f"gpt2/{name}" for name in _PRE_TOKENIZERS)
        raise ModelRefused(f"GGUF tokenizer {kind}/{pre} is not known; known: {known}")
    pieces = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _PRE_TOKENIZERS[pre] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    specials = [piece for piece, token_type in zip(pieces, kinds, strict=True) if token_type == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
    return tokenizer


def _write_tokenizer(fields: Fields, folder: Path) -> None:
    tokenizer = make_tokenizer(fields)
    tokenizer.save(str(folder / "tokenizer.json"))
    pieces = fields["tokenizer.ggml.tokens"]
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name, field in names.items():
        if (token_id := fields.get(f"tokenizer.ggml.{field}")) is not None:
            config[name] = pieces[token_id]
    _write_json(folder / "tokenizer_config.json", config)
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


# --- weights ----------------------------------------------------------------------------------------------------------


def _write_weights(tensors: list[Any], config: Mapping[str, Any], path: Path, progress: Progress) -> int:
    """Write one safetensors file, tensor by tensor, so that memory holds one weight at a time; returns its size in
    bytes.

    The header is padded so that data starts on a 64-byte line; offsets follow the order of the GGUF file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + int(np.prod(tensor.shape)) * 4
        header[rename_tensor(tensor.name)] = {
            "dtype": "F32",
            "shape": [int(n) for n in reversed(tensor.shape)],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, weight in enumerate(_read_weights(tensors, config)):
            file.write(np.ascontiguousarray(weight).data)
            progress("converting weights", (i + 1) / len(tensors))
        file.flush()
        os.fsync(file.fileno())
    return path.stat().st_size


def _read_weights(tensors: list[Any], config: Mapping[str, Any]) -> Iterator[Weight]:
    from gguf.quants import dequantize  # conversion only

    for tensor in tensors:
        weight: Weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            weight = unpermute(weight, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            weight = unpermute(weight, config["num_key_value_heads"])
        yield weight


def rename_tensor(name: str) -> str:
    """GGUF tensor name to the transformers name of the llama family; raises `ModelRefused` for one it does not know."""
    if name in _OTHER_TENSORS:
        return _OTHER_TENSORS[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight"
    raise ModelRefused(f"GGUF tensor {name!r} is not known")


def unpermute(weight: Weight, num_heads: int) -> Weight:
    """Undo llama.cpp's interleaving of the rotary halves of q and k: `[num_heads * head_dim, width]` either way."""
    rows, width = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(rows, width)
