"""Rows of the comparison of engines: each engine's figures, and Baton's default against each of them."""

from tests.bench.engines import DEFAULT
from tests.bench.figures import Figure
from tests.bench.rounds import Measured
from tests.bench.rows import Row, compare, spread

LEAST: dict[Figure, float] = {"single": 1.5, "batch16": 1.5, "prefill": 1.2}
"""The ratios of the default to the best peer that acceptance line 4 asks for."""
READY_S = 5.0


def compared_rows(measured: Measured) -> list[Row]:
    rows: list[Row] = []
    for figure in ("single", "batch16", "prefill", "contexts1000", "contexts4000"):
        rows += _figure_rows(measured, figure)
    return [*rows, *_start_rows(measured)]


def best_peer(measured: Measured, figure: Figure) -> str | None:
    """The engine, none of ours, with the highest median."""
    rated = [
        (row.value, name)
        for name, figures in measured.samples.items()
        if not name.startswith("baton") and (row := spread("", "", figures.get(figure, []))) is not None
    ]
    return max(rated)[1] if rated else None


def _figure_rows(measured: Measured, figure: Figure) -> list[Row]:
    ours, best = measured.samples.get(DEFAULT, {}).get(figure, []), best_peer(measured, figure)
    rows = [] if best else [spread(_name(measured, DEFAULT, figure), "tok/s", ours)]
    for name, figures in measured.samples.items():
        theirs = figures.get(figure, [])
        if name != DEFAULT:
            rows.append(spread(_name(measured, name, figure), "tok/s", theirs))
            least = LEAST.get(figure) if name == best else None
            rows.append(compare(_name(measured, DEFAULT, figure), "tok/s", ours, theirs, name, least))
    return [row for row in rows if row is not None]


def _start_rows(measured: Measured) -> list[Row]:
    rows = []
    for name, loaded in measured.loaded.items():
        is_default = name == DEFAULT
        rows.append(
            Row(
                name=_name(measured, name, "start"),
                unit="s to first token",
                value=loaded.start_s,
                min=loaded.start_s,
                max=loaded.start_s,
                target=f"<= {READY_S:g} s" if is_default else "",
                holds=loaded.start_s <= READY_S if is_default else None,
            )
        )
        mib = loaded.peak_memory_bytes / (1 << 20)
        rows.append(Row(name=_name(measured, name, "memory"), unit="MiB peak", value=mib, min=mib, max=mib))
    return rows


def _name(measured: Measured, engine: str, figure: str) -> str:
    return f"{figure}, {measured.threads} thread{'s' if measured.threads > 1 else ''}: {engine}"
