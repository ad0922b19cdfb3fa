"""Linears of a checkpoint that is quantized already: as rows of numbers, or in a grid of ours where theirs fits it.

Knows the names of a module's tensors. The layouts themselves: `workers/quantization/`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workers.model.checkpoint import Checkpoint, Cut
from workers.model.scheme import AWQ, FP8, GPTQ, Int8, PackedInts, Scheme
from workers.ops.weights import Int8Weight, Q4Weight
from workers.quantization.awq import unpack_awq
from workers.quantization.compressed import unpack_int8, unpack_packed
from workers.quantization.fp8 import dequantize_blocks
from workers.quantization.gptq import unpack_gptq
from workers.quantization.groups import GroupGrid

_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)
_INDEX = (torch.int32, torch.int64)


class QuantizedRows:
    """Reads what a module stores: a plain `weight` as it is (a module that the scheme leaves out), else the scheme's
    tensors.

    Raises `ModelDamaged`, with file, tensor and reason, where one is missing, of another shape or dtype, or a scale is
    no number.
    """

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme) -> None:
        self._checkpoint = checkpoint
        self._scheme = scheme

    def read_rows(
        self, parts: Sequence[tuple[str, int]], width: int, dtype: torch.dtype, cut: Cut | None = None
    ) -> Tensor:
        """As `Checkpoint.read_rows`: quantized parts in float32, then in `dtype`."""
        cut = cut or Cut(tuple(range(rows) for _, rows in parts), range(width))
        kept = []
        for (tensor, num_rows), rows in zip(parts, cut.rows, strict=True):
            if self._is_plain(tensor):
                own = Cut((rows,), cut.columns)
                kept.append(self._checkpoint.read_rows([(tensor, num_rows)], width, dtype, own))
                continue
            found = self._read(tensor, num_rows, width)
            dense_NK = found.dequantize() if isinstance(found, GroupGrid) else found
            kept.append(dense_NK[rows.start : rows.stop, cut.columns.start : cut.columns.stop].to(dtype))
        return torch.cat(kept)

    def read_q4(self, parts: Sequence[tuple[str, int]], width: int) -> Q4Weight | None:
        """Matrices of (tensor, rows) under each other, none of their numbers moved; None unless each fits the grid."""
        fitted = []
        for grid in self._read_grids(parts, width):
            fit = None if grid is None else grid.fit_q4()
            if fit is None:
                return None
            fitted.append(fit)
        return Q4Weight(*(torch.cat(each) for each in zip(*fitted, strict=True)))

    def read_int8(self, parts: Sequence[tuple[str, int]], width: int) -> Int8Weight | None:
        """The same for 8 bits with one scale per row."""
        fitted = []
        for grid in self._read_grids(parts, width):
            fit = None if grid is None else grid.fit_rows()
            if fit is None:
                return None
            fitted.append(fit)
        return Int8Weight(*(torch.cat(each) for each in zip(*fitted, strict=True)))

    def _read_grids(self, parts: Sequence[tuple[str, int]], width: int) -> Iterator[GroupGrid | None]:
        """Of each part; None for one that is stored as floats."""
        for tensor, num_rows in parts:
            if isinstance(self._scheme, FP8) or self._is_plain(tensor):
                yield None
                continue
            found = self._read(tensor, num_rows, width)
            yield found if isinstance(found, GroupGrid) else None

    def _is_plain(self, tensor: str) -> bool:
        return self._checkpoint.dtype_of(tensor) in ("F64", "F32", "F16", "BF16")

    def _read(self, tensor: str, num_rows: int, width: int) -> GroupGrid | Tensor:
        """A grid, or the numbers `[num_rows, width]` in float32."""
        module = tensor.removesuffix(".weight")
        match self._scheme:
            case GPTQ() as scheme:
                return self._read_gptq(scheme, module, num_rows, width)
            case AWQ() as scheme:
                groups = self._count_groups(f"{module}.qweight", scheme.group_size, width)
                words = self._count_words(f"{module}.qweight", num_rows, 8)
                return unpack_awq(
                    self._words(f"{module}.qweight", (width, words)),
                    self._words(f"{module}.qzeros", (groups, words)),
                    self._scales(f"{module}.scales", ((groups, num_rows),)),
                )
            case PackedInts() as scheme:
                return self._read_packed(scheme, tensor, num_rows, width)
            case Int8() as scheme:
                return self._read_int8(scheme, tensor, num_rows, width)
            case FP8() as scheme:
                return self._read_fp8(scheme, tensor, num_rows, width)

    def _read_gptq(self, scheme: GPTQ, module: str, num_rows: int, width: int) -> GroupGrid:
        groups, per_word = self._count_groups(f"{module}.qweight", scheme.group_size, width), 32 // scheme.bits
        has_index = scheme.has_act_order or f"{module}.g_idx" in self._checkpoint
        return unpack_gptq(
            self._words(f"{module}.qweight", (self._count_words(f"{module}.qweight", width, per_word), num_rows)),
            self._words(f"{module}.qzeros", (groups, -(-num_rows // per_word))),
            self._scales(f"{module}.scales", ((groups, num_rows),)),
            self._index(f"{module}.g_idx", width, groups) if has_index else None,
            scheme.bits,
            scheme.is_v1,
        )

    def _read_packed(self, scheme: PackedInts, tensor: str, num_rows: int, width: int) -> GroupGrid:
        groups, per_word = self._count_groups(f"{tensor}_packed", scheme.group_size, width), 32 // scheme.bits
        packed = self._words(f"{tensor}_packed", (num_rows, -(-width // per_word)))
        shape = self._checkpoint.read_as(f"{tensor}_shape", ((2,),), _INDEX).tolist()
        if shape != [num_rows, width]:
            raise self._checkpoint.damaged(f"{tensor}_shape", f"says {shape}, config.json says {[num_rows, width]}")
        return unpack_packed(
            packed,
            self._scales(f"{tensor}_scale", ((num_rows, groups),)),
            None if scheme.is_symmetric else self._words(f"{tensor}_zero_point", (-(-num_rows // per_word), groups)),
            self._index(f"{tensor}_g_idx", width, groups) if scheme.has_act_order else None,
            scheme.bits,
            width,
        )

    def _read_int8(self, scheme: Int8, tensor: str, num_rows: int, width: int) -> GroupGrid:
        groups = self._count_groups(tensor, scheme.group_size, width)
        numbers = self._checkpoint.read_as(tensor, ((num_rows, width),), (torch.int8,))
        shapes = ((1,), (), (1, 1)) if scheme.has_one_scale else ((num_rows, groups),)
        scale_NS = self._scales(f"{tensor}_scale", shapes)
        zero_NS = None
        if not scheme.is_symmetric:
            zero_NS = self._checkpoint.read_as(f"{tensor}_zero_point", shapes, (torch.int8,))
        if scheme.has_one_scale:
            scale_NS = scale_NS.reshape(1, 1).expand(num_rows, 1).contiguous()
            zero_NS = None if zero_NS is None else zero_NS.reshape(1, 1).expand(num_rows, 1).contiguous()
        return unpack_int8(numbers, scale_NS, zero_NS)

    def _read_fp8(self, scheme: FP8, tensor: str, num_rows: int, width: int) -> Tensor:
        block = (scheme.block[0] or num_rows, scheme.block[1] or width)
        numbers = self._checkpoint.read_as(tensor, ((num_rows, width),), (torch.float8_e4m3fn,))
        module = tensor.removesuffix("weight")
        names = [module + name for name in scheme.scale_names]
        name = next((name for name in names if name in self._checkpoint), names[0])
        blocks = (-(-num_rows // block[0]), -(-width // block[1]))
        shapes = (blocks, (1,), ()) if blocks == (1, 1) else (blocks, blocks[:1]) if blocks[1] == 1 else (blocks,)
        dense_NK = dequantize_blocks(numbers, self._scales(name, shapes).reshape(blocks), block)
        if not bool(dense_NK.isfinite().all()):
            raise self._checkpoint.damaged(tensor, "holds numbers that are not finite")
        return dense_NK

    def _count_groups(self, tensor: str, group_size: int | None, width: int) -> int:
        if group_size is not None and width % group_size:
            raise self._checkpoint.damaged(tensor, f"has {width} inputs, no multiple of group_size {group_size}")
        return 1 if group_size is None else width // group_size

    def _count_words(self, tensor: str, count: int, per_word: int) -> int:
        if count % per_word:
            raise self._checkpoint.damaged(
                tensor, f"packs {per_word} numbers in a word, config.json has {count} of them"
            )
        return count // per_word

    def _words(self, tensor: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.read_as(tensor, (shape,), (torch.int32,))

    def _scales(self, tensor: str, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
        found = self._checkpoint.read_as(tensor, shapes, _SCALES).float()
        if not bool(found.isfinite().all()):
            raise self._checkpoint.damaged(tensor, "holds scales that are not finite numbers")
        return found

    def _index(self, tensor: str, width: int, num_groups: int) -> Tensor:
        found = self._checkpoint.read_as(tensor, ((width,),), _INDEX)
        if not bool(((found >= 0) & (found < num_groups)).all()):
            raise self._checkpoint.damaged(tensor, f"names groups outside 0 to {num_groups - 1}")
        return found
