"""The rows of a bench: value, spread, what it is against, ratio, target, holds or not; and the table they print as."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    value: float
    unit: str
    min: float
    max: float
    against: str = ""
    ratio: float | None = None
    """Median over rounds of (value / what it is against), both of the same round."""
    target: str = ""
    holds: bool | None = None


def spread(name: str, unit: str, samples: Sequence[float | None]) -> Row | None:
    """Median and spread; None without a sample."""
    known = [sample for sample in samples if sample is not None]
    if not known:
        return None
    return Row(name=name, unit=unit, value=median(known), min=min(known), max=max(known))


def compare(
    name: str,
    unit: str,
    ours: Sequence[float | None],
    theirs: Sequence[float | None],
    against: str,
    least: float | None,
) -> Row | None:
    """The spread of ours and the ratio within rounds; `least` is the target of the ratio."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if not pairs:
        return None
    values, ratio = [a for a, _ in pairs], median(a / b for a, b in pairs)
    return Row(
        name=name, unit=unit, value=median(values), min=min(values), max=max(values), against=against, ratio=ratio,
        target="" if least is None else f">= {least:g}x", holds=None if least is None else ratio >= least,
    )  # fmt: skip


def print_rows(rows: Sequence[Row]) -> str:
    """A plain table, one row a line."""
    head = ("what", "median", "min", "max", "unit", "against", "ratio", "target", "holds")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    holds = "" if row.holds is None else "yes" if row.holds else "NO"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    return (row.name, *map(show, (row.value, row.min, row.max)), row.unit, row.against, ratio, row.target, holds)


def show(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
