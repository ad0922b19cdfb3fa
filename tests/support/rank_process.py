"""One rank of a tensor-parallel group as a process: `python -m tests.support.rank_process CONFIG RANK PORT`.

CONFIG is the JSON of a `GroupConfig`, paths as strings.
"""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from workers.replica.tp_group import GroupConfig, run_rank

ROOT = Path(__file__).resolve().parents[2]


def spawn_rank(config: GroupConfig, rank: int, port: int) -> subprocess.Popen[bytes]:
    text = json.dumps(asdict(config), default=str)
    command = (sys.executable, "-m", "tests.support.rank_process", text, str(rank), str(port))
    return subprocess.Popen(command, cwd=ROOT)


def main() -> None:
    given = json.loads(sys.argv[1])
    paths = {name: Path(given[name]) for name in ("folder", "secret_path")}
    run_rank(GroupConfig(**(given | paths)), int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
