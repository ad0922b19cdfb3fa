"""A model folder to a transformers model in memory: checked before it is loaded, local files only, no code of the
folder run.

Knows safetensors and transformers. Knows no cache and no request.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workers.errors import ModelDamaged, ModelRefused
from workers.model.arch import read_config
from workers.model.progress import Progress, ignore_progress
from workers.model.scheme import read_scheme

_MAX_HEADER_BYTES = 100 << 20
_SAMPLE_BYTES = 4096


def load_causal_lm(folder: Path, dtype: torch.dtype, attention: str, progress: Progress = ignore_progress) -> Any:
    """The transformers model of `folder` in `dtype`, in evaluation mode, with the registered `attention`.

    Raises `ModelDamaged` when weights are missing, cut short or of other shapes than config.json says, and
    `ModelRefused` when transformers does not know the architecture, weights are quantized or there are no safetensors.
    """
    progress("checking the model's files", 0.0)
    if read_scheme(read_config(folder)) is not None:
        raise ModelRefused(
            f"{folder.name}: its weights are quantized already; the transformers classes need packages of their own for"
            " that, and Baton's decoder reads them for its own families only (docs/models.md)"
        )
    check_weights(folder)
    progress("importing transformers", 0.0)
    from transformers import AutoModelForCausalLM  # a second that only a process with a model pays
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what it warns of is an error of ours below
    progress("loading weights", 0.0)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, instead of a traceback
        )
    except (ValueError, KeyError) as error:
        is_fixed = error.args == (attention,)
        why = "the attention of its classes cannot be replaced by one over a paged cache" if is_fixed else error
        raise ModelRefused(f"{folder.name}: transformers does not load it: {why}") from None
    for kind in ("missing_keys", "mismatched_keys"):  # transformers fills both with random numbers
        if report[kind]:
            raise ModelDamaged(
                f"{folder.name}: {len(report[kind])} {kind.replace('_', ' ')}, first {sorted(report[kind])[0]}"
            )
    model.eval()
    model.requires_grad_(False)
    progress("loading weights", 1.0)
    return model


def check_weights(folder: Path) -> int:
    """Bytes of all weights; raises `ModelRefused` without safetensors and `ModelDamaged` where a file is cut short."""
    paths = list_weights(folder)
    if not paths:
        raise ModelRefused(f"{folder.name} holds no *.safetensors; other weight files can run code and are not read")
    return sum(_check_file(path) for path in paths)


def list_weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def fingerprint_weights(folder: Path) -> str:
    """A digest of every tensor's name, shape and dtype and of samples of its bytes; tells models apart, proves nothing.

    Reads 4 KiB of each end of each tensor, so it takes milliseconds where a full hash takes seconds.
    """
    digest = hashlib.sha256()
    for path in list_weights(folder):
        header, start = _read_header(path)
        with path.open("rb") as file:
            for name, entry in sorted(_tensors_of(header)):
                low, high = entry["data_offsets"]
                digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                for offset in (low, max(low, high - _SAMPLE_BYTES)):
                    file.seek(start + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, high - low)))
    return digest.hexdigest()


def _check_file(path: Path) -> int:
    header, start = _read_header(path)
    try:
        end = max((int(entry["data_offsets"][1]) for _, entry in _tensors_of(header)), default=0)
    except (KeyError, IndexError, TypeError, ValueError):
        raise ModelDamaged(f"{path.name}: its header does not describe tensors") from None
    size = path.stat().st_size
    if size != start + end:
        raise ModelDamaged(f"{path.name} has {size} bytes, its header promises {start + end}: copy or convert it again")
    return int(end)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The parsed header and where the data starts."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise ModelDamaged(f"{path.name} is no whole safetensors file: header of {length} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ModelDamaged(f"{path.name} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelDamaged(f"{path.name} is no safetensors file: its header is no object")
    return header, 8 + length


def _tensors_of(header: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, entry) for name, entry in header.items() if name != "__metadata__")
