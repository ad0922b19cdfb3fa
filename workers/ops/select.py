"""Chooses the backend of the op set, once at start, and says why."""

from dataclasses import dataclass
from typing import Literal, assert_never

from workers.errors import BackendUnavailable
from workers.ops.base import Ops

BackendName = Literal["auto", "native", "reference"]


@dataclass(frozen=True, slots=True)
class Choice:
    ops: Ops
    reason: str
    """For the start-up line and `baton config`."""


def select_ops(wanted: BackendName, num_threads: int) -> Choice:
    """The backend named `wanted` with this process's share of cores; "auto" takes the fastest that runs here.

    Raises `BackendUnavailable` for a named one that does not run here.
    """
    match wanted:
        case "native":
            from workers.ops.native import NativeOps  # its library is loaded only where it is used

            ops = NativeOps(num_threads)
            return Choice(ops, f"native: {ops.level} kernels, {num_threads} threads")
        case "reference":
            from workers.ops.reference import ReferenceOps

            return Choice(ReferenceOps(), "reference: plain torch, asked for")
        case "auto":
            try:
                return select_ops("native", num_threads)
            except BackendUnavailable as error:
                return Choice(select_ops("reference", num_threads).ops, f"reference: plain torch; {error}")
        case _:
            assert_never(wanted)
