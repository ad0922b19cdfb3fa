"""The tensors of a model folder by name: each read once, shape checked, straight into the place that it is for.

Knows safetensors. Knows no model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.errors import ModelDamaged
from workers.model.loader import check_weights, list_weights
from workers.model.progress import Progress, ignore_progress

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Cut(NamedTuple):
    """What one rank keeps of matrices that stand under each other."""

    rows: tuple[range, ...]
    """Of each."""
    columns: range


class Checkpoint:
    """Open for the time of a load; files are mapped, so a tensor costs memory only where it is copied to.

    Raises `ModelRefused` without safetensors, `ModelDamaged` for a file cut short.
    """

    def __init__(self, folder: Path, progress: Progress = ignore_progress) -> None:
        check_weights(folder)
        self._name = folder.name
        self._progress = progress
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path in list_weights(folder):
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelDamaged(f"{folder.name}/{path.name} cannot be read: {error}") from None
            self._file_of.update(dict.fromkeys(file.keys(), file))
            self._path_of.update(dict.fromkeys(file.keys(), path))
        self._num_read = 0

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._file_of

    def dtype_of(self, tensor: str) -> str | None:
        """As safetensors names it ("F32", "F8_E4M3"); None for a tensor that is not there."""
        file = self._file_of.get(tensor)
        return None if file is None else str(file.get_slice(tensor).get_dtype())

    def damaged(self, tensor: str, why: str) -> ModelDamaged:
        """The error that names the tensor and its file."""
        path = self._path_of.get(tensor)
        return ModelDamaged(f"{self._name}{'' if path is None else f'/{path.name}'}: tensor {tensor} {why}")

    def read(self, tensor: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in its stored dtype; raises `ModelDamaged` where it is missing or of another shape, or holds no
        floating point numbers of 16 bits or more."""
        return self.read_as(tensor, (shape,), _FLOATS)

    def read_as(self, tensor: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The tensor as it is stored; raises `ModelDamaged` where it is missing or not of one of the shapes and
        dtypes."""
        if tensor not in self._file_of:
            packed = (
                f"{tensor.removesuffix('weight')}qweight",
                f"{tensor}_packed",
            )  # of GPTQ and AWQ, compressed-tensors
            there = next((name for name in packed if name in self._file_of), None)
            hint = f", {there} is there: config.json has lost its quantization_config" if there else ""
            raise self.damaged(tensor, f"is missing{hint}")
        try:
            found: Tensor = self._file_of[tensor].get_tensor(tensor)
        except (SafetensorError, OSError) as error:
            raise self.damaged(tensor, f"cannot be read: {error}") from None
        if tuple(found.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.damaged(tensor, f"is {list(found.shape)}, config.json says {wanted}")
        if found.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.damaged(tensor, f"holds {found.dtype}, not one of {names}")
        self._num_read += 1
        self._progress("loading weights", min(1.0, self._num_read / len(self._file_of)))
        return found

    def read_rows(
        self, parts: Sequence[tuple[str, int]], width: int, dtype: torch.dtype, cut: Cut | None = None
    ) -> Tensor:
        """Matrices of (tensor, rows) under each other, `[sum of rows, width]` in `dtype`, or what `cut` keeps of it."""
        cut = cut or Cut(tuple(range(rows) for _, rows in parts), range(width))
        kept = torch.empty((sum(map(len, cut.rows)), len(cut.columns)), dtype=dtype)
        start = 0
        for (tensor, num_rows), rows in zip(parts, cut.rows, strict=True):
            found = self.read(tensor, (num_rows, width))  # mapped: only what is copied is read
            columns = slice(cut.columns.start, cut.columns.stop)
            kept[start : start + len(rows)].copy_(found[rows.start : rows.stop, columns])
            start += len(rows)
        return kept
