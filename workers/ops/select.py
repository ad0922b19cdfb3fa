"""Chooses the backend of the op set, once at start, and says why."""

from dataclasses import dataclass
from typing import Literal, assert_never

import torch

from workers.ops.base import Ops
from workers.ops.reference import ReferenceOps

BackendName = Literal["auto", "reference"]


@dataclass(frozen=True, slots=True)
class Choice:
    ops: Ops
    reason: str
    """For the start-up line and `baton config`."""


def select_ops(wanted: BackendName, device: torch.device | str = "cpu") -> Choice:
    """The backend named `wanted`; "auto" takes the fastest that runs here. Raises `BackendUnavailable` for a named one
    that does not.
    """
    match wanted:
        case "reference":
            return Choice(ReferenceOps(device=device), "reference: asked for")
        case "auto":
            return Choice(ReferenceOps(device=device), "reference: the only backend")
        case _:
            assert_never(wanted)
