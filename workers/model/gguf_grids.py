"""Quantized weights of a GGUF file as they lie in it, under the names of the converted folder.

Reads the header itself: the `gguf` package takes two seconds for it, mostly over the tokenizer. Knows the two grids
that the op set has, Q4_1 and Q8_0; a tensor of another type is not offered and is made from the converted weights.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.errors import ModelDamaged
from workers.model.gguf import rename_tensor, unpermute
from workers.ops.weights import GROUP, Q4Weight, Q8Weight

_Q4_1, _Q8_0 = 3, 8
_BYTES_PER_GROUP = {_Q4_1: 20, _Q8_0: 34}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Bytes = npt.NDArray[np.uint8]


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    """Rows first."""
    kind: int
    start: int
    """In the file."""


class GGUFGrids:
    """The grids of one file; mapped, so reading copies only what is asked for."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """`config` is the converted folder's config.json. Raises `ModelDamaged` where the header is cut short."""
        try:
            with path.open("rb") as file:
                self._entries = _read_entries(file)
        except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
            raise ModelDamaged(f"{path.name} is not a whole GGUF file: {error}") from None
        self._bytes: Bytes = np.memmap(path, np.uint8, mode="r")
        self._heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"],
        }

    def read_q4(self, parts: list[tuple[str, int]], width: int) -> Q4Weight | None:
        """Matrices of (tensor, rows) under each other; None unless each of them is Q4_1 and of that shape."""
        groups = self._read_all(parts, width, _Q4_1)
        if groups is None:
            return None
        halves = groups[:, :, :4].copy().view(np.float16)
        nibbles = np.ascontiguousarray(groups[:, :, 4:]).reshape(len(groups), -1)
        return Q4Weight(_tensor(nibbles), _tensor(halves[:, :, 0]), _tensor(halves[:, :, 1]))

    def read_q8(self, parts: list[tuple[str, int]], width: int) -> Q8Weight | None:
        """The same for Q8_0."""
        groups = self._read_all(parts, width, _Q8_0)
        if groups is None:
            return None
        scales = groups[:, :, :2].copy().view(np.float16)[:, :, 0]
        numbers = np.ascontiguousarray(groups[:, :, 2:]).view(np.int8).reshape(len(groups), -1)
        return Q8Weight(_tensor(numbers), _tensor(scales))

    def _read_all(self, parts: list[tuple[str, int]], width: int, kind: int) -> Bytes | None:
        """`[rows of all parts, width / 32, bytes of a group]`."""
        found = []
        for tensor, rows in parts:
            entry = self._entries.get(tensor)
            if entry is None or entry.kind != kind or entry.shape != (rows, width):
                return None
            found.append(self._read(tensor, entry))
        return np.concatenate(found)

    def _read(self, tensor: str, entry: _Entry) -> Bytes:
        rows, width = entry.shape
        per_group = _BYTES_PER_GROUP[entry.kind]
        size = rows * width // GROUP * per_group
        if entry.start + size > len(self._bytes):
            raise ModelDamaged(f"the GGUF file ends within {tensor}")
        groups = self._bytes[entry.start : entry.start + size].reshape(rows, width // GROUP, per_group)
        heads = self._heads.get(tensor.split(".")[-2])
        if heads is None:
            return groups
        order = unpermute(np.arange(rows, dtype=np.float32)[:, None], heads)[:, 0].astype(np.int64)
        return groups[order]


def open_grids(folder: Path, config: Mapping[str, Any]) -> GGUFGrids | None:
    """The file that `folder` was converted from, where it still lies beside the weights; None otherwise."""
    try:
        manifest = json.loads((folder / "baton.json").read_text())
        path = folder / str(manifest["source"])
        if path.stat().st_size != manifest["source_bytes"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return GGUFGrids(path, config)


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _read_entries(file: BinaryIO) -> dict[str, _Entry]:
    """Every tensor by its name in the converted folder."""
    magic, _, num_tensors, num_fields = _unpack(file, "4sIQQ")
    if magic != b"GGUF":
        raise ValueError(f"it starts with {magic!r}")
    alignment = 32
    for _ in range(num_fields):
        key = _read_string(file)
        value = _read_value(file, *_unpack(file, "I"))
        if key == b"general.alignment":
            alignment = int(value)
    found = {}
    for _ in range(num_tensors):
        name = _read_string(file).decode()
        (num_dims,) = _unpack(file, "I")
        *sizes, kind, offset = _unpack(file, f"{num_dims}QIQ")
        found[rename_tensor(name)] = _Entry(tuple(reversed(sizes)), kind, offset)
    data = math.ceil(file.tell() / alignment) * alignment
    return {name: entry._replace(start=data + entry.start) for name, entry in found.items()}


def _read_value(file: BinaryIO, kind: int) -> Any:
    """A number; arrays and strings are skipped."""
    if kind == _STRING:
        return _read_string(file)
    if kind != _ARRAY:
        return _unpack(file, _SCALARS[kind])[0]
    of, count = _unpack(file, "IQ")
    if of in _SCALARS:
        return file.seek(count * struct.calcsize(_SCALARS[of]), 1)
    for _ in range(count):
        _read_value(file, of)
    return None


def _read_string(file: BinaryIO) -> bytes:
    return file.read(_unpack(file, "Q")[0])


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))
