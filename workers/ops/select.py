"""Chooses the backend of the op set, once at start, and says why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

from workers.errors import BackendUnavailable
from workers.ops.base import Ops

BackendName = Literal["auto", "native", "reference", "cuda"]


@dataclass(frozen=True, slots=True)
class Choice:
    ops: Ops
    reason: str
    """For the start-up line and `baton config`."""


def select_ops(wanted: BackendName, num_threads: int, block_tokens: int = 16) -> Choice:
    """The backend named `wanted` with this process's share of cores; "auto" takes the fastest that runs on the CPU.

    `block_tokens`: of the cache that it will work on.
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
        case "cuda":
            return _select_cuda(block_tokens)
        case "auto":
            try:
                return select_ops("native", num_threads)
            except BackendUnavailable as error:
                return Choice(select_ops("reference", num_threads).ops, f"reference: plain torch; {error}")
        case _:
            assert_never(wanted)


def _select_cuda(block_tokens: int) -> Choice:
    """flash-attn where it reads blocks of any size, else FlashInfer, else what gathers."""
    import torch

    from workers.ops.cuda import CudaOps
    from workers.ops.cuda_attention import FlashAttention, PagedKernel
    from workers.ops.cuda_flashinfer import FlashInferAttention

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "no CUDA device is visible" if built else f"torch {torch.__version__} was built without CUDA"
        raise BackendUnavailable(f"cuda: {why}; device: cpu runs without one")
    device = torch.device("cuda", torch.cuda.current_device())
    makers: tuple[Callable[[], PagedKernel], ...] = (
        lambda: FlashAttention(block_tokens),
        lambda: FlashInferAttention(device),
    )
    lacks = []
    for make in makers:
        try:
            kernel = make()
        except BackendUnavailable as error:
            lacks.append(str(error))
        else:
            why = "".join(f"; {lack}" for lack in lacks)
            return Choice(
                CudaOps(device, kernel, block_tokens), f"cuda: {kernel.name}{why}; layers it lacks: gather + SDPA"
            )
    return Choice(CudaOps(device), f"cuda: gather + SDPA ({', '.join(lacks)})")
