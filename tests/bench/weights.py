"""The same weights in the form that each peer takes, made once from the shipped GGUF or its converted folder.

gguf-q4_0, gguf-q8_0   the Q4_1 matrices dequantized and rounded again by the `gguf` package; the rest as it is
onnx-int4              by onnxruntime-genai's own builder, round to nearest, groups of 32, head included
w8a8                   8 bits per row, activations 8 bits per token at run time, as compressed-tensors names it
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.engines import Form, Package

BUILD_LIMIT_S = 900.0
_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}


class NotConverted(Exception):
    """The text is the reason."""


def provide(form: Form, folder: Path, place: Path, venvs: Path, builder: Package) -> Path:
    """The path to give to a runner. `folder` is the converted model, `place` keeps what is made.

    Raises `NotConverted`.
    """
    match form:
        case "converted":
            return folder
        case "gguf-q4_0":
            return _once(place / "q4_0.gguf", lambda to: _round_gguf(folder, to, "Q4_0"))
        case "gguf-q8_0":
            return _once(place / "q8_0.gguf", lambda to: _round_gguf(folder, to, "Q8_0"))
        case "onnx-int4":
            python = venvs / builder.name / "bin" / "python"
            return _once(place / "onnx-int4", lambda to: _build_onnx(folder, to, python))
        case "w8a8":
            return _once(place / "w8a8", lambda to: _round_rows(folder, to))


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made whole or not at all."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name("unfinished-" + path.name)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    make(unfinished)
    unfinished.rename(path)
    return path


def _round_gguf(folder: Path, to: Path, kind: str) -> None:
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    (source,) = folder.glob("*.gguf")
    reader = GGUFReader(str(source))
    writer = GGUFWriter(str(to), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name == "general.file_type":
            writer.add_file_type(_FILE_TYPES[kind])
        elif not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, its = tensor.data, tensor.tensor_type
        if its == Kind.Q4_1:
            data, its = quantize(dequantize(data, its), Kind[kind]), Kind[kind]
        writer.add_tensor(tensor.name, data, raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _build_onnx(folder: Path, to: Path, python: Path) -> None:
    """Runs in the peer's environment with torch and transformers of ours, which the builder imports."""
    import torch

    site = Path(torch.__file__).parents[1]
    command = [
        str(python), "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(to), "-p", "int4", "-e",
        "cpu", "-c", str(to.parent / "onnx-cache"), "--extra_options", "block_size=32", "algo_config=rtn",
        "prune_lm_head=true",
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ, check=False, timeout=BUILD_LIMIT_S, errors="replace"
    )
    if done.returncode:
        raise NotConverted(f"onnxruntime-genai's builder: {done.stderr.strip().splitlines()[-1][:200]}")


def _round_rows(folder: Path, to: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    to.mkdir(parents=True)
    tensors: dict[str, Any] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
            tensors[name] = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name + "_scale"] = scale.to(torch.bfloat16)
        else:
            tensors[name] = weight.to(torch.bfloat16)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": _w8a8_config()}
    (to / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, to / name)


def _w8a8_config() -> dict[str, Any]:
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**shared, "strategy": "channel", "dynamic": False},
                "input_activations": {**shared, "strategy": "token", "dynamic": True},
            }
        },
    }
