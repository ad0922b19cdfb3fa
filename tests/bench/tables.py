"""Markdown tables of stored rows and samples."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.bench.rows import show


def markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rows = table
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def median_of(samples: Sequence[float | None]) -> str:
    known = [sample for sample in samples if sample is not None]
    return show(median(known)) if known else "failed"


def ratio_of(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Median over rounds."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    return median(ratios) if ratios else None


def show_ratio(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.2f}x"


def show_change(ratio: float) -> str:
    return f"{ratio - 1:+.2%}"


def target_table(rows: Sequence[dict[str, Any]]) -> str:
    """Every row that has a target, and whether it holds."""
    table = [("what", "value", "against", "ratio", "target", "holds")]
    for row in rows:
        show_it = show_change if row["against"] == "fp32" else show_ratio
        ratio = "" if row["ratio"] is None else show_it(row["ratio"])
        holds = "yes" if row["holds"] else "**no**"
        table.append((row["name"], f"{show(row['value'])} {row['unit']}", row["against"], ratio, row["target"], holds))
    return markdown(table)
