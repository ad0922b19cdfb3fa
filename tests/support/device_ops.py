"""A backend of another device under tests whose tensors lie on the CPU: arguments go over, results stay there."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from workers.ops.base import Ops

OPS = ("embed", "norm", "linear", "rotate_and_store", "attend", "activate", "dense_mlp", "experts", "head")


def move(value: Any, device: torch.device) -> Any:
    """Tensors of the value, of its items and of its frozen fields on the device; itself where nothing moves."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(move(item, device) for item in value)
    if dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        moved = {name: move(item, device) for name, item in own.items()}
        return value if all(moved[name] is own[name] for name in own) else dataclasses.replace(value, **moved)
    return value


class DeviceOps:
    """`Ops` whose inputs may lie anywhere; what an op changes in place is changed where it lies."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._moved: dict[int, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name not in OPS:
            return found

        def run(*arguments: Any) -> Any:
            moved = [self._move(argument) for argument in arguments]
            result = found(*moved)
            if name == "norm" and arguments[0] is not moved[0]:
                arguments[0].copy_(moved[0])
            return result

        return run

    def _move(self, value: Any) -> Any:
        """One object per given one, as an engine has: a backend may remember what it made of a step's tables."""
        if isinstance(value, Tensor):
            return value.to(self._ops.device)
        if id(value) not in self._moved:
            self._moved[id(value)] = (value, move(value, self._ops.device))
        return self._moved[id(value)][1]
