"""Cases for backends of the op set: random weights of every grid, steps over scattered blocks, caches of either layout.

`BACKENDS` names every implementation that the contract suite runs; one that cannot run here is skipped with its reason.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.support.device_ops import DeviceOps
from workers.model.build import quantize
from workers.ops.base import Ops, Span, StepTables
from workers.ops.cuda import CudaOps
from workers.ops.native import NativeOps
from workers.ops.reference import ReferenceOps, dequantize
from workers.ops.select import select_ops
from workers.ops.weights import AttentionLayer, Q4Weight, RopeTable, Weight

BACKENDS: dict[str, Callable[[], Ops]] = {
    "reference": ReferenceOps,
    "cuda-on-cpu": lambda: DeviceOps(CudaOps("cpu")),  # type: ignore[return-value,dict-item]
    "cuda": lambda: DeviceOps(select_ops("cuda", 1).ops),  # type: ignore[return-value,dict-item]
    "native-avx512": lambda: NativeOps(2, "avx512"),
    "native-avx2": lambda: NativeOps(2, "avx2"),
    "native-portable": lambda: NativeOps(1, "portable"),
    "native-token-major": lambda: NativeOps(1, key_is_dim_major=False),
}
GRIDS = ("fp32", "bf16", "int8", "q4", "q8")
EXACT_GRIDS = ("fp32", "bf16")


def allowed(ops: Ops, grid: str, tolerance: float, rounding: float = 3e-2) -> float:
    """`rounding` where a backend rounds inputs to bfloat16, as `Ops.linear` allows; one product of it errs by 2**-9."""
    return rounding if ops.name == "cuda" and grid == "bf16" else tolerance


def random_tensor(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * sum(shape))) * scale


def random_weight(grid: str, rows: int, width: int, seed: int = 0) -> Weight:
    dense_NK = random_tensor(rows, width, seed=seed + 7, scale=width**-0.5)
    if grid == "q8":
        return quantize(dense_NK, "q4", is_head=True)
    return quantize(dense_NK, grid)  # type: ignore[arg-type]


def magnitudes(weight: Weight) -> Tensor:
    """`[N, K]` float64: the size of the numbers that a product adds up; a Q4 weight is a difference of larger ones."""
    sizes_NK = dequantize(weight, torch.float64).abs()
    if isinstance(weight, Q4Weight):
        low_NK = weight.min_NG.double().repeat_interleave(32, dim=1)
        sizes_NK = (dequantize(weight, torch.float64) - low_NK).abs() + low_NK.abs()
    return sizes_NK


def random_rope(pairs: int, positions: int) -> RopeTable:
    angle_LR = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    return RopeTable(angle_LR.cos(), angle_LR.sin())


def make_layer(heads: int, kv_heads: int, head_dim: int, **traits: object) -> AttentionLayer:
    given = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5, "rope": None}
    return AttentionLayer(**(given | traits))  # type: ignore[arg-type]


def make_step(chunks: Sequence[tuple[int, int]], block_tokens: int, seed: int = 0) -> tuple[StepTables, int]:
    """(tables, blocks of the pool) for chunks of (tokens before the step, tokens in it); blocks are scattered, and one
    in four belongs to nobody.
    """
    counts = [-(-(first + count) // block_tokens) for first, count in chunks]
    num_blocks = max(4, sum(counts) * 4 // 3 + 1)
    free = random.Random(seed).sample(range(num_blocks), sum(counts))
    spans, table, positions, blocks = [], [], [], []
    for (first, count), needed in zip(chunks, counts, strict=True):
        own, free = free[:needed], free[needed:]
        spans.append(Span(len(positions), count, first, len(table), needed))
        positions += range(first, first + count)
        blocks += [own[p // block_tokens] for p in range(first, first + count)]
        table += own
    positions_T = torch.tensor(positions)
    return StepTables(
        positions_T, torch.tensor(blocks), positions_T % block_tokens, torch.tensor(table), tuple(spans)
    ), num_blocks


def random_cache(
    tables: StepTables, num_blocks: int, layer: AttentionLayer, block_tokens: int, dtype: torch.dtype
) -> Tensor:
    """`[B, 2, J, S, D]`, K token-major: every context of the step holds numbers, every other slot NaN."""
    shape = (num_blocks, 2, layer.num_kv_heads, block_tokens, layer.head_dim)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    numbers = random_tensor(*shape, seed=3).to(dtype)
    for span in tables.spans:
        for entry in range(span.num_blocks):
            block = int(tables.table_X[span.first_entry + entry])
            used = min(block_tokens, span.context - entry * block_tokens)
            cache[block, :, :, :used] = numbers[block, :, :, :used]
    return cache


def to_backend(ops: Ops, cache: Tensor) -> Tensor:
    """A copy of a token-major cache in the layout that the backend keeps K in."""
    copy = cache.clone()
    if ops.key_is_dim_major:
        copy[:, 0] = cache[:, 0].transpose(2, 3).reshape(cache[:, 0].shape)
    return copy.to(ops.device)


def from_backend(ops: Ops, cache: Tensor) -> Tensor:
    """The inverse of `to_backend`."""
    copy = cache.cpu().clone()
    if ops.key_is_dim_major:
        blocks, _, heads, tokens, dim = copy.shape
        copy[:, 0] = copy[:, 0].clone().reshape(blocks, heads, dim, tokens).transpose(2, 3)
    return copy


def assert_close(found: Tensor, expected: Tensor, tolerance: float, size: Tensor | float | None = None) -> None:
    """Each difference is at most `tolerance` times `size` (default: the largest expected number)."""
    assert found.shape == expected.shape
    if not expected.numel():
        return
    limit = expected.abs().amax() if size is None else size
    difference = (found.cpu().double() - expected.double()).abs()
    worst = (difference / (torch.as_tensor(limit).double() + 1e-30)).amax().item()
    assert worst <= tolerance, f"off by {worst:.2e} of the size, {tolerance:.0e} allowed"
