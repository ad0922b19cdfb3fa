"""build/bench/engine.json: `rows` of every part as style asks, and per part its samples, versions and when it ran."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.machine import load_average, machine_facts, own_versions
from tests.bench.rows import Row, to_json


def read_results(path: Path) -> dict[str, Any]:
    """What was written last; empty parts where there is nothing."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {"machine": machine_facts(), "parts": {}, "rows": []}


def store_part(path: Path, part: str, rows: Sequence[Row], **detail: Any) -> None:
    """Replace the results of one part, whole or not at all."""
    results = read_results(path)
    results["machine"] = machine_facts()
    results["parts"][part] = {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "versions": own_versions(),
        "load average before": load_average(), "rows": to_json(rows), **detail,
    }  # fmt: skip
    results["rows"] = [row for known in results["parts"].values() for row in known["rows"]]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)
