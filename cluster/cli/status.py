"""`baton status`: the pools of the running server; `--json` lists the workers for scripts."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cluster.cli.client import add_url, ask, connect, find_url

EXAMPLES = """examples:
  baton status            the pools, as a table
  baton status --json     every worker: pool, role, pid, ranks, state, blocks in use and quarantined, running, waiting
"""
COLUMNS = ("pool", "role", "pid", "ranks", "state", "blocks in use", "quarantined", "running", "waiting", "KV over")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "status",
        help="show the pools of the running server",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the workers as JSON, for scripts")
    add_url(parser)
    parser.set_defaults(run=lambda options: show_status(options.url, options.json))


def show_status(url: str | None, is_json: bool) -> int:
    with connect(find_url(url), timeout_s=10.0) as client:
        status = ask(client, "GET", "/baton/status")
    print(json.dumps(status, indent=2) if is_json else render_status(status))
    return 0


def render_status(status: Mapping[str, Any]) -> str:
    """One row per worker, and what waits in the ingress."""
    rows = [_row(worker) for worker in status["workers"]]
    present = {worker["pool"] for worker in status["workers"]}
    wanted = ("prefill", "decode") if status.get("disaggregation") == "always" else ("colocated",)
    rows += [[pool, "-", "-", "-", "no worker", "-", "-", "-", "-", "-"] for pool in wanted if pool not in present]
    waiting = ", ".join(f"{count} for {label}" for label, count in status.get("queue", {}).items() if count)
    lines = _table(COLUMNS, rows)
    return "\n".join([*lines, "", f"queue: {waiting or 'empty'}; open streams: {status.get('open_streams', 0)}"])


def _row(worker: Mapping[str, Any]) -> list[str]:
    blocks = f"{_show(worker['blocks_in_use'])} of {_show(worker['blocks_total'])}"
    before = [_show(worker[name]) for name in ("pool", "role", "pid", "ranks", "state")]
    after = [_show(worker[name]) for name in ("blocks_quarantined", "running", "waiting")]
    return [*before, blocks, *after, "; ".join(worker.get("kv_over") or ()) or "-"]


def _show(value: object) -> str:
    """A worker that has not reported yet knows no figures."""
    return "-" if value is None else str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    table = [list(header), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
