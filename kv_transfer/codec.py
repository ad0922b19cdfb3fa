"""Dataclasses to msgpack and back, with limits: the only decoder that bytes of a peer ever meet.

Knows dataclasses, msgpack and bounds. Knows no message and no socket. Every field is checked for type, length and range
before an object exists; anything else is `FrameInvalid`.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Sized

import msgpack

from kv_transfer.errors import FrameInvalid


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """Annotation of an int or float field: low <= value <= high."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Annotation of a str, bytes or tuple field: low <= len(value) <= high."""

    low: int
    high: int


Check = Callable[[object], typing.Any]


def _check_scalar(kind: type, bounds: tuple[object, ...]) -> Check:
    between = next((b for b in bounds if isinstance(b, Between)), None)
    size = next((b for b in bounds if isinstance(b, Size)), None)
    if kind is int and between is not None:
        return _check_int(between.low, between.high)

    def check(value: object) -> object:
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise FrameInvalid(f"expected {kind.__name__}, got {type(value).__name__}")
        if between is not None and not between.low <= value <= between.high:  # type: ignore[operator]  # int or float here
            raise FrameInvalid(f"{kind.__name__} outside [{between.low}, {between.high}]")
        if size is not None and not size.low <= (length := len(typing.cast("Sized", value))) <= size.high:
            raise FrameInvalid(f"{kind.__name__} of length {length} outside [{size.low}, {size.high}]")
        return value

    return check


def _check_int(low: float, high: float) -> Check:
    """The commonest field, without a step that it does not need."""

    def check(value: object) -> int:
        if type(value) is not int:
            raise FrameInvalid(f"expected int, got {type(value).__name__}")
        if not low <= value <= high:
            raise FrameInvalid(f"int outside [{low}, {high}]")
        return value

    return check


def _check_tuple(item: Check, bounds: tuple[object, ...]) -> Check:
    size = next((b for b in bounds if isinstance(b, Size)), Size(0, 4096))

    def check(value: object) -> object:
        if not isinstance(value, list) or not size.low <= len(value) <= size.high:
            raise FrameInvalid(f"expected a list of {size.low} to {size.high} items")
        return tuple([item(v) for v in value])

    return check


def _check_optional(inner: Check) -> Check:
    return lambda value: None if value is None else inner(value)


def _check_literal(options: tuple[object, ...]) -> Check:
    def check(value: object) -> object:
        if value not in options:
            raise FrameInvalid(f"expected one of {options}")
        return value

    return check


def _check_message(cls: type) -> Check:
    hints = typing.get_type_hints(cls, include_extras=True)
    checks = [make_check(hints[f.name]) for f in dataclasses.fields(cls)]

    def check(value: object) -> object:
        if not isinstance(value, list) or len(value) != len(checks):
            raise FrameInvalid(f"{cls.__name__} needs {len(checks)} fields")
        return cls(*[one(item) for one, item in zip(checks, value, strict=True)])

    return check


def make_check(hint: object, bounds: tuple[object, ...] = ()) -> Check:
    """A function that turns one decoded msgpack value into the annotated type or raises `FrameInvalid`.

    Understands int, float, bool, str, bytes, Literal, `T | None`, `tuple[T, ...]`, nested dataclasses, and `Annotated`
    with `Between` or `Size`.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return make_check(args[0], tuple(args[1:]))
    if origin is typing.Literal:
        return _check_literal(args)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [a for a in args if a is not type(None)]
        return _check_optional(make_check(inner, bounds))
    if origin is tuple:
        return _check_tuple(make_check(args[0]), bounds)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _check_message(hint)
    if hint in (int, float, bool, str, bytes):
        return _check_scalar(typing.cast("type", hint), bounds)
    raise TypeError(f"wire cannot carry {hint!r}")


Flatten = Callable[[typing.Any], list[object] | None]


def make_flatten(hint: object) -> Flatten | None:
    """A function that turns a value of the annotated type into what msgpack packs; None where msgpack takes it as it
    is. Made once per class: frames of a step are packed while the engine waits for the interpreter lock.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return make_flatten(args[0])
    if origin in (types.UnionType, typing.Union):
        (inner,) = [make_flatten(a) for a in args if a is not type(None)]
        return None if inner is None else lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = make_flatten(args[0])
        return None if item is None else lambda value: [item(v) for v in value]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _make_flatten_message(hint)
    return None


def _make_flatten_message(cls: type) -> Flatten:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls)]
    nested = [(at, flat) for at, name in enumerate(names) if (flat := make_flatten(hints[name])) is not None]

    def flatten(value: object) -> list[object]:
        fields = [getattr(value, name) for name in names]
        for at, flat in nested:
            fields[at] = flat(fields[at])
        return fields

    return flatten


class Codec:
    """Encodes and decodes the messages of one plane; `decode` raises `FrameInvalid` and nothing else on any input."""

    def __init__(self, *messages: type, max_frame_bytes: int = 1 << 20, max_array: int = 1 << 16) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._max_array = max_array
        self._tags = {cls: tag for tag, cls in enumerate(messages)}
        self._checks = [_check_message(cls) for cls in messages]
        self._flattens = {cls: _make_flatten_message(cls) for cls in messages}

    def encode(self, message: object) -> bytes:
        cls = type(message)
        fields = self._flattens[cls](message)
        assert fields is not None
        payload: bytes = msgpack.packb([self._tags[cls], *fields], use_bin_type=True)
        if len(payload) > self.max_frame_bytes:
            raise FrameInvalid(f"{cls.__name__} of {len(payload)} bytes is over the limit of {self.max_frame_bytes}")
        return payload

    def decode(self, payload: bytes) -> object:
        if len(payload) > self.max_frame_bytes:
            raise FrameInvalid(f"payload of {len(payload)} bytes is over the limit of {self.max_frame_bytes}")
        try:
            fields = msgpack.unpackb(
                payload, raw=False, strict_map_key=True,
                max_str_len=self.max_frame_bytes, max_bin_len=self.max_frame_bytes,
                max_array_len=self._max_array, max_map_len=0, max_ext_len=0,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # msgpack raises a dozen unrelated types on hostile input
            raise FrameInvalid(f"payload is not msgpack within the limits ({type(error).__name__})") from None
        if (
            not isinstance(fields, list)
            or not fields
            or type(fields[0]) is not int
            or not 0 <= fields[0] < len(self._checks)
        ):
            raise FrameInvalid("payload does not start with a known message tag")
        return self._checks[fields[0]](fields[1:])
