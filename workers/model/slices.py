"""Parts of matrices of any grid: the grid values of a part are those of the whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.errors import ModelRefused
from workers.ops.weights import GROUP, DenseWeight, Int8Weight, Q4Weight, Q8Weight, Weight


def list_rows(parts: Sequence[tuple[str, int]], kept: Sequence[range]) -> Tensor | None:
    """Row numbers in the fused matrix of what is kept of each (tensor, rows); None where all is."""
    if all(len(own) == rows for (_, rows), own in zip(parts, kept, strict=True)):
        return None
    numbers: list[int] = []
    start = 0
    for (_, rows), own in zip(parts, kept, strict=True):
        numbers += range(start + own.start, start + own.stop)
        start += rows
    return torch.tensor(numbers)


def take(weight: Weight, rows_N: Tensor | None, columns: range) -> Weight:
    """The weight's rows (None: all) and columns. Raises `ModelRefused` where columns cut a group of a grid."""
    is_whole = len(columns) == weight.shape[1]
    if rows_N is None and is_whole:
        return weight
    if isinstance(weight, DenseWeight):
        return DenseWeight(_pick(weight.data_NK, rows_N, columns))
    if not is_whole and (columns.start % GROUP or columns.stop % GROUP):
        raise ModelRefused(
            f"a rank would hold inputs {columns.start} to {columns.stop} of a matrix whose inputs share scales in"
            f" groups of {GROUP}: use dtype bf16 or fp32, or another number of ranks"
        )
    groups = range(columns.start // GROUP, columns.stop // GROUP)
    match weight:
        case Int8Weight():
            return Int8Weight(
                _pick(weight.q_NK, rows_N, columns), weight.scale_N if rows_N is None else weight.scale_N[rows_N]
            )
        case Q8Weight():
            return Q8Weight(_pick(weight.q_NK, rows_N, columns), _pick(weight.scale_NG, rows_N, groups))
        case Q4Weight():
            nibbles = range(columns.start // 2, columns.stop // 2)
            return Q4Weight(
                _pick(weight.q_NP, rows_N, nibbles),
                _pick(weight.scale_NG, rows_N, groups),
                _pick(weight.min_NG, rows_N, groups),
            )


def _pick(data_NX: Tensor, rows_N: Tensor | None, columns: range) -> Tensor:
    picked = data_NX[:, columns.start : columns.stop]
    return (picked if rows_N is None else picked[rows_N]).contiguous()
