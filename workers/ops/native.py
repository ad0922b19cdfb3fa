"""The op set in C++ on the CPU: `workers/native/` through ctypes, one call per op, or per step for a dense decoder.

Knows the C ABI (`workers/native/abi.h`) and tensors. K lies dim-major in its block unless asked otherwise. Every row of
a result depends on its own inputs alone, to the last bit: threads, batch and chunks change nothing.
"""

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from workers.engine.plan import ignore_layer
from workers.errors import BackendUnavailable
from workers.native import build
from workers.ops.base import PlainTables, RowDraw, Span, StepTables
from workers.ops.mlp import run_dense_mlp, run_experts
from workers.ops.weights import (
    Activation,
    AttentionLayer,
    DecoderLayer,
    DecoderWeights,
    DenseMLP,
    DenseWeight,
    Int8Weight,
    Packed,
    Q4Weight,
    Q8Weight,
    RoutedMLP,
    Weight,
)

Level = Literal["portable", "avx2", "avx512"]
LEVELS: tuple[Level, ...] = ("portable", "avx2", "avx512")
"""By their number in the ABI, slowest first."""
LANES = 16
"""head_dim is a multiple of it."""
STAGES = ("rows", "linears", "attention", "head")
_KINDS = {"fp32": 0, "bf16": 1, "int8": 2, "q8": 3, "q4": 4}
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "swiglu_clamp": 2}
_NO_MEMORY, _STOPPED = -1, -2

OnLayer = CFUNCTYPE(c_int32, c_int64)


def _fields(**kinds: str) -> list[tuple[str, type]]:
    """Fields of a struct from names by type, in order: integer, pointer and float."""
    types = {"integer": c_int64, "pointer": c_void_p, "real": c_float}
    return [(name, types[kind]) for kind, names in kinds.items() for name in names.split()]


class CWeight(Structure):
    _fields_ = _fields(integer="kind n k", pointer="data scale min")


class CAttention(Structure):
    _fields_ = _fields(
        integer="num_heads num_kv_heads head_dim window rope_pairs rope_positions",
        pointer="cos sin q_norm k_norm sinks",
        real="scale softcap norm_eps",
    )


class CTables(Structure):
    _fields_ = _fields(integer="num_tokens num_spans num_entries", pointer="positions block_of slot_of table spans")


class CCache(Structure):
    _fields_ = [("data", c_void_p), *_fields(integer="num_blocks block_tokens is_bf16 key_is_dim_major")]


class CLayer(Structure):
    _fields_ = [
        ("attention", CAttention),
        *_fields(
            pointer="qkv out gate_up down qkv_bias out_bias gate_up_bias down_bias "
            "attention_norm after_attention_norm mlp_norm after_mlp_norm"
        ),
        ("activation", c_int64),
    ]


class CDecoder(Structure):
    _fields_ = _fields(
        integer="num_layers", pointer="layers embedding head norm", real="embedding_scale norm_eps softcap"
    )


class CDraw(Structure):
    _fields_ = [
        *_fields(integer="row top_k"),
        ("uniform", c_double),
        *_fields(real="temperature top_p min_p"),
    ]


def load_library(folder: Path = build.FOLDER) -> ctypes.CDLL:
    """The built library; raises `BackendUnavailable` with the reason where there is none, or one of other sources."""
    path = folder / build.LIBRARY.name
    if not path.exists():
        outcome = build.read_outcome(folder)
        raise BackendUnavailable(
            f"native kernels: {outcome.reason if outcome else 'not built; make native builds them'}"
        )
    try:
        library = ctypes.CDLL(str(path))
        library.baton_source_hash.restype = c_char_p
        found = library.baton_source_hash().decode()
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"native kernels: {path.name} does not load: {error}") from None
    if found != build.hash_sources(folder):
        raise BackendUnavailable("native kernels: built from other sources; make native builds them again")
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, number, real, code = c_void_p, c_int64, c_float, c_int32
    signatures: dict[str, tuple[type | None, tuple[type, ...]]] = {
        "best_level": (code, ()),
        "open": (pointer, (code, code)),
        "close": (None, (pointer,)),
        "pack": (pointer, (pointer, POINTER(CWeight))),
        "free_matrix": (None, (pointer,)),
        "matrix_bytes": (number, (pointer,)),
        "embed": (code, (pointer, pointer, pointer, number, real, pointer)),
        "norm": (code, (pointer, pointer, pointer, pointer, real, number, number, pointer)),
        "linear": (code, (pointer, pointer, pointer, number, pointer, pointer)),
        "rotate_and_store": (code, (pointer, *(POINTER(c) for c in (CAttention, CTables, CCache)), pointer, pointer)),
        "attend": (code, (pointer, *(POINTER(c) for c in (CAttention, CTables, CCache)), pointer, pointer)),
        "activate": (code, (pointer, number, pointer, number, number, pointer)),
        "softcap": (code, (pointer, pointer, number, number, real)),
        "draw": (code, (pointer, pointer, number, pointer, number, pointer)),
        "find_largest": (code, (pointer, pointer, number, number, pointer, pointer)),
        "make_model": (pointer, (pointer, POINTER(CDecoder))),
        "free_model": (None, (pointer,)),
        "step": (code, (pointer, pointer, pointer, number, POINTER(CTables), POINTER(CCache), pointer, pointer)),
        "stage_ns": (None, (pointer, pointer)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"baton_{name}")
        function.restype, function.argtypes = result, arguments


@dataclass(frozen=True, slots=True, weakref_slot=True)
class NativeMatrix:
    """A packed weight. Its memory is the library's, until this object goes."""

    handle: int
    shape: tuple[int, int]
    num_bytes: int


class NativeOps:
    """Implements `Ops`. Owns `num_threads - 1` helper threads, which sleep between calls."""

    name = "native"
    device = torch.device("cpu")

    def __init__(
        self,
        num_threads: int = 1,
        level: Level | None = None,
        key_is_dim_major: bool = True,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """`level` None takes the best of this processor. Raises `BackendUnavailable`."""
        self._c = library or load_library()
        best = LEVELS[self._c.baton_best_level()]
        self.level: Level = level or best
        self.num_threads = num_threads
        self.key_is_dim_major = key_is_dim_major
        self._engine = self._c.baton_open(LEVELS.index(self.level), num_threads)
        if not self._engine:
            raise BackendUnavailable(f"native kernels: no {self.level} with {num_threads} threads here, best is {best}")
        self._attentions: dict[int, tuple[AttentionLayer, CAttention]] = {}
        weakref.finalize(self, self._c.baton_close, self._engine)

    def pack(self, weight: Weight) -> NativeMatrix:
        given, kept = _describe(weight)
        handle = self._c.baton_pack(self._engine, byref(given))
        if not handle:
            raise MemoryError(f"no memory for a weight of {weight.shape}")
        del kept  # the tensors `given` points to
        matrix = NativeMatrix(handle, weight.shape, self._c.baton_matrix_bytes(handle))
        weakref.finalize(matrix, self._c.baton_free_matrix, handle)
        return matrix

    def embed(self, ids_T: Tensor, table: Packed, scale: float) -> Tensor:
        matrix = _native(table)
        out_TM = torch.empty(len(ids_T), matrix.shape[1])
        ids_T = ids_T.contiguous()
        self._run("embed", matrix.handle, ids_T.data_ptr(), len(ids_T), scale, out_TM.data_ptr())
        return out_TM

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float, delta_TM: Tensor | None = None) -> Tensor:
        own_TM, weight_M = x_TM.contiguous(), weight_M.contiguous()
        out_TM = torch.empty_like(own_TM)
        delta_TM = None if delta_TM is None else delta_TM.contiguous()
        num_rows, width = own_TM.shape
        self._run(
            "norm", own_TM.data_ptr(), _pointer(delta_TM), weight_M.data_ptr(), eps, num_rows, width, out_TM.data_ptr()
        )
        if delta_TM is not None and own_TM is not x_TM:
            x_TM.copy_(own_TM)
        return out_TM

    def linear(self, x_TK: Tensor, weight: Packed, bias_N: Tensor | None = None) -> Tensor:
        matrix, x_TK = _native(weight), x_TK.contiguous()
        out_TN = torch.empty(len(x_TK), matrix.shape[0])
        self._run("linear", matrix.handle, x_TK.data_ptr(), len(x_TK), _pointer(bias_N), out_TN.data_ptr())
        return out_TN

    def rotate_and_store(
        self, qkv_TN: Tensor, attention: AttentionLayer, tables: StepTables, cache_B2JSD: Tensor
    ) -> Tensor:
        qkv_TN = qkv_TN.contiguous()
        q_THD = torch.empty(len(qkv_TN), attention.num_heads, attention.head_dim)
        where, kept = _describe_tables(tables)
        cache = self._describe_cache(cache_B2JSD)
        facts = self._attention(attention)
        self._run("rotate_and_store", byref(facts), byref(where), byref(cache), qkv_TN.data_ptr(), q_THD.data_ptr())
        del kept
        return q_THD

    def attend(self, q_THD: Tensor, attention: AttentionLayer, tables: StepTables, cache_B2JSD: Tensor) -> Tensor:
        q_THD = q_THD.contiguous()
        out_TN = torch.empty(len(q_THD), attention.num_heads * attention.head_dim)
        where, kept = _describe_tables(tables)
        cache = self._describe_cache(cache_B2JSD)
        facts = self._attention(attention)
        self._run("attend", byref(facts), byref(where), byref(cache), q_THD.data_ptr(), out_TN.data_ptr())
        del kept
        return out_TN

    def activate(self, gate_up_TN: Tensor, activation: Activation) -> Tensor:
        gate_up_TN = gate_up_TN.contiguous()
        num_rows, width = gate_up_TN.shape[0], gate_up_TN.shape[1] // 2
        out_TI = torch.empty(num_rows, width)
        self._run("activate", _ACTIVATIONS[activation], gate_up_TN.data_ptr(), num_rows, width, out_TI.data_ptr())
        return out_TI

    def dense_mlp(self, x_TM: Tensor, mlp: DenseMLP) -> Tensor:
        return run_dense_mlp(self, x_TM, mlp)

    def experts(self, x_TM: Tensor, mlp: RoutedMLP) -> Tensor:
        return run_experts(self, x_TM, mlp)

    def head(self, x_RM: Tensor, weight: Packed, softcap: float | None) -> Tensor:
        logits_RV = self.linear(x_RM, weight)
        if softcap is not None:
            self._run("softcap", logits_RV.data_ptr(), *logits_RV.shape, softcap)
        return logits_RV

    def draw(self, logits_RV: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        """A `DrawRows`."""
        assert logits_RV.is_contiguous(), "rows of logits lie one after the other"
        given = (CDraw * len(draws))(
            *(CDraw(d.row, d.top_k, d.uniform, d.temperature, d.top_p, d.min_p) for d in draws)
        )
        tokens = (c_int64 * len(draws))()
        self._run("draw", logits_RV.data_ptr(), logits_RV.shape[1], given, len(draws), tokens)
        return list(tokens)

    def find_largest(self, logits_RV: Tensor) -> tuple[list[float], list[int]]:
        """A `FindLargest`."""
        assert logits_RV.is_contiguous(), "rows of logits lie one after the other"
        num_rows, width = logits_RV.shape
        best, places = (c_float * num_rows)(), (c_int64 * num_rows)()
        self._run("find_largest", logits_RV.data_ptr(), num_rows, width, best, places)
        return list(best), list(places)

    def make_step(self, model: DecoderWeights) -> "NativeStep | None":
        if any(isinstance(layer.mlp, RoutedMLP) for layer in model.layers):
            return None
        return NativeStep(self, self._c, self._engine, model)

    def _run(self, name: str, *arguments: object) -> None:
        _check(getattr(self._c, f"baton_{name}")(self._engine, *arguments))

    def _attention(self, layer: AttentionLayer) -> CAttention:
        """Made once per layer; the layer is kept, so that its id and its tensors stay."""
        known = self._attentions.get(id(layer))
        if known is None:
            known = self._attentions[id(layer)] = (layer, _describe_attention(layer))
        return known[1]

    def _describe_cache(self, cache: Tensor) -> CCache:
        """Of one layer, or of all."""
        assert cache.is_contiguous(), "the cache is one piece of memory"
        blocks, block_tokens = cache.shape[-5], cache.shape[-2]
        return CCache(cache.data_ptr(), blocks, block_tokens, cache.dtype == torch.bfloat16, self.key_is_dim_major)


class NativeStep:
    """A dense decoder in one call. Implements `Step`."""

    def __init__(self, ops: NativeOps, library: ctypes.CDLL, engine: int, model: DecoderWeights) -> None:
        self._ops, self._c, self._weights = ops, library, model
        self._layers = (CLayer * len(model.layers))(*(_describe_layer(layer) for layer in model.layers))
        decoder = CDecoder(
            len(model.layers), ctypes.addressof(self._layers), _native(model.embedding).handle,
            _native(model.head).handle, model.norm_M.data_ptr(), model.embedding_scale, model.norm_eps,
            model.softcap or 0.0,
        )  # fmt: skip
        self._model = library.baton_make_model(engine, byref(decoder))
        if not self._model:
            raise MemoryError("no memory for the step of a model")
        weakref.finalize(self, library.baton_free_model, self._model)
        self._listener: Callable[[int], None] | None = None
        self._error: BaseException | None = None
        self._callback = OnLayer(self._tell)
        self._cache: tuple[Tensor, CCache] | None = None

    def run(
        self,
        ids_T: Tensor,
        rows_R: Tensor,
        tables: StepTables,
        data: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `Step.run`; without a listener, or where it is `ignore_layer`, no layer is told."""
        ids_T, rows_R = ids_T.contiguous(), rows_R.contiguous()
        where, kept = _describe_tables(tables)
        logits_RV = self._run((ids_T.data_ptr(), rows_R.data_ptr(), len(rows_R)), where, data, on_layer)
        del kept
        return logits_RV

    def run_plain(
        self,
        ids: list[int],
        rows: list[int],
        tables: PlainTables,
        data: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `run`, of plain numbers: they lie in one array."""
        parts = (tables.positions, tables.block_of, tables.slot_of, tables.table, [*chain.from_iterable(tables.spans)])
        numbers, starts = array("q", ids), [0]
        for part in (rows, *parts):
            starts.append(len(numbers))
            numbers.extend(part)
        base, size = numbers.buffer_info()[0], numbers.itemsize
        ids_at, rows_at, *pointers = (base + start * size for start in starts)
        where = CTables(len(ids), len(tables.spans), len(tables.table), *pointers)
        return self._run((ids_at, rows_at, len(rows)), where, data, on_layer)

    def _run(
        self, given: tuple[int, int, int], where: CTables, data: Tensor, on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """`given`: where the ids lie, where the rows, and how many rows."""
        logits_RV = torch.empty(given[2], self._weights.head.shape[0])
        cache = self._describe_cache(data)
        self._listener, self._error = on_layer, None
        callback = self._callback if on_layer not in (None, ignore_layer) else None
        code = self._c.baton_step(self._model, *given, byref(where), byref(cache), callback, logits_RV.data_ptr())
        if code == _STOPPED and self._error is not None:
            raise self._error
        _check(code)
        return logits_RV

    def _describe_cache(self, data: Tensor) -> CCache:
        """Made once: a cache stays where it is."""
        if self._cache is None or self._cache[0] is not data:
            self._cache = data, self._ops._describe_cache(data)
        return self._cache[1]

    def take_stage_ns(self) -> dict[str, int]:
        """Nanoseconds per stage since the last call, as the calling thread saw them."""
        spent = (c_int64 * len(STAGES))()
        self._c.baton_stage_ns(self._model, ctypes.addressof(spent))
        return dict(zip(STAGES, spent, strict=True))

    def _tell(self, layer: int) -> int:
        try:
            assert self._listener is not None
            self._listener(layer)
        except BaseException as error:  # noqa: BLE001 - raised again in `run`: nothing may unwind through C
            self._error = error
            return 1
        return 0


def _check(code: int) -> None:
    if code == _NO_MEMORY:
        raise MemoryError("no memory for the buffers of a step")
    if code:
        raise ValueError("a token id, position, block or slot of the step lies outside the model or its cache")


def _native(matrix: Packed) -> NativeMatrix:
    assert isinstance(matrix, NativeMatrix), f"{type(matrix).__name__} was packed by another backend"
    return matrix


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the library reads whole tensors"
    return tensor.data_ptr()


def _describe(weight: Weight) -> tuple[CWeight, list[Tensor]]:
    """The struct, and the tensors it points to."""
    minimum: Tensor | None = None
    scale: Tensor | None = None
    match weight:
        case DenseWeight(data_NK=data):
            kind = "bf16" if data.dtype == torch.bfloat16 else "fp32"
            data = data if kind == "bf16" else data.float()
        case Int8Weight(q_NK=data, scale_N=scale):
            kind, scale = "int8", scale.float()
        case Q8Weight(q_NK=data, scale_NG=scale):
            kind = "q8"
        case Q4Weight(q_NP=data, scale_NG=scale, min_NG=minimum):
            kind = "q4"
    kept = [tensor.contiguous() for tensor in (data, scale, minimum) if tensor is not None]
    pointers = [tensor.data_ptr() for tensor in kept]
    return CWeight(_KINDS[kind], *weight.shape, *pointers), kept


def _describe_attention(layer: AttentionLayer) -> CAttention:
    if layer.head_dim % LANES:
        raise BackendUnavailable(f"native kernels: head_dim {layer.head_dim} is no multiple of {LANES}")
    cos, sin = (layer.rope.cos_LR, layer.rope.sin_LR) if layer.rope is not None else (None, None)
    positions, pairs = cos.shape if cos is not None else (0, 0)
    return CAttention(
        layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window or 0, pairs, positions, _pointer(cos),
        _pointer(sin), _pointer(layer.q_norm_D), _pointer(layer.k_norm_D), _pointer(layer.sinks_H), layer.scale,
        layer.softcap or 0.0, layer.norm_eps,
    )  # fmt: skip


def _describe_layer(layer: DecoderLayer) -> CLayer:
    mlp = layer.mlp
    assert isinstance(mlp, DenseMLP), "experts run op by op"
    matrices = (_native(matrix).handle for matrix in (layer.qkv, layer.out, mlp.gate_up, mlp.down))
    biases = (layer.qkv_bias_N, layer.out_bias_M, mlp.gate_up_bias_N, mlp.down_bias_M)
    norms = (layer.attention_norm_M, layer.after_attention_norm_M, layer.mlp_norm_M, layer.after_mlp_norm_M)
    return CLayer(
        _describe_attention(layer.attention), *matrices, *map(_pointer, biases), *map(_pointer, norms),
        _ACTIVATIONS[mlp.activation],
    )  # fmt: skip


def _describe_tables(tables: StepTables) -> tuple[CTables, object]:
    """The struct, and what it points to."""
    given = (tables.positions_T, tables.block_of_T, tables.slot_of_T, tables.table_X)
    kept = [tensor.contiguous() for tensor in given]
    spans = (c_int64 * (len(Span._fields) * len(tables.spans)))(*chain.from_iterable(tables.spans))
    pointers = [tensor.data_ptr() for tensor in kept]
    facts = CTables(len(kept[0]), len(tables.spans), len(kept[3]), *pointers, ctypes.addressof(spans))
    return facts, (kept, spans)
