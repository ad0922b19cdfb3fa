"""Strict YAML files: each error names file, line and key, and says what to do. Knows no setting."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(ValueError):
    """A configuration file or setting is wrong; the text has one line per fault, ready to print."""


class StrictModel(BaseModel):
    """Base of every schema: unknown keys and wrong types are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


ModelT = TypeVar("ModelT", bound=StrictModel)
Location = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class YamlSource:
    """A parsed file: its values and where each key stands."""

    path: Path
    value: object
    lines: Mapping[Location, int]

    def line(self, location: Location) -> int:
        """The line of a key, or of the nearest key above it that the file has; 1 where there is none."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)


def load_yaml(path: Path, schema: type[ModelT]) -> ModelT:
    """The validated content of a file. Raises `ConfigError` when it cannot be read, is no YAML, or breaks the
    schema.
    """
    return validate(read_yaml(path), schema)


def read_yaml(path: Path) -> YamlSource:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
    try:
        lines: dict[Location, int] = {}
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _index_lines(path, node, (), lines)
        return YamlSource(path, yaml.safe_load(text), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: is not valid YAML: {error.problem}") from None


def _index_lines(path: Path, node: yaml.Node, location: Location, lines: dict[Location, int]) -> None:
    lines.setdefault(location, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _index_lines(path, child, (*location, index), lines)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, child in node.value:
        here = (*location, str(key.value))
        if here in lines:
            raise ConfigError(f"{path}:{key.start_mark.line + 1}: {_dotted(here)}: stands twice; keep one of them")
        lines[here] = key.start_mark.line + 1
        _index_lines(path, child, here, lines)


def validate(source: YamlSource, schema: type[ModelT]) -> ModelT:
    if not isinstance(source.value, dict):
        raise ConfigError(
            f"{source.path}:1: must be a mapping of keys to values; known keys: {_listed(schema.model_fields)}"
        )
    try:
        return schema.model_validate(source.value)
    except ValidationError as error:
        faults = [_explain_fault(source, schema, fault) for fault in error.errors(include_url=False)]
        raise ConfigError("\n".join(faults)) from None


def _explain_fault(source: YamlSource, schema: type[BaseModel], fault: Mapping[str, object]) -> str:
    location = tuple(part for part in _sequence(fault["loc"]) if not _is_union_tag(part))
    where = f"{source.path}:{source.line(location)}: {_dotted(location) or 'the file'}"
    if fault["type"] == "extra_forbidden":
        known = _known_keys(schema, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        return f"{where}: unknown key; " + (f"did you mean {close[0]!r}?" if close else f"known here: {_listed(known)}")
    if fault["type"] == "missing":
        return f"{where}: is missing; add it"
    message = str(fault["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    given = fault.get("input")
    return f"{where}: {message}" + ("" if isinstance(given, dict | list) else f" (found {given!r})")


def _sequence(value: object) -> Sequence[int | str]:
    assert isinstance(value, tuple)
    return value


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained-", "function-")) or part in ("int", "float", "str")
    )


def _known_keys(schema: type[BaseModel], location: Location) -> list[str]:
    """The keys of the section at `location` of a schema."""
    for part in location:
        field = schema.model_fields.get(str(part))
        inner = next((kind for kind in _kinds(field.annotation) if _is_model(kind)), None) if field else None
        if inner is None:
            return []
        schema = inner
    return sorted(schema.model_fields)


def _kinds(annotation: object) -> Iterable[type]:
    return [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]


def _is_model(kind: type) -> bool:
    return issubclass(kind, BaseModel)


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
