"""`make bench-engine`: the engine against its peers, the machine and itself.

    python -m tests.bench.engine                       everything, about 40 minutes with the peers installed
    python -m tests.bench.engine peers --rounds 2      engine against engine
    python -m tests.bench.engine peers --engines llama,openvino --threads 2
    python -m tests.bench.engine install               only make the peers' environments and weights
    python -m tests.bench.engine cluster | limits | quality | ready
    python -m tests.bench.engine docs                  docs/models.md and docs/performance.md from the last results

Each part replaces its own results in build/bench/engine.json; the others stay. It exits 0 whether targets hold or not.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.bench import parts
from tests.bench.engines import ROOT, find_engines

PARTS = ("install", "limits", "ready", "peers", "cluster", "quality", "docs")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="*", default=list(PARTS), help=f"any of: {', '.join(PARTS)} (all)", metavar="PART"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all engines (5)")
    parser.add_argument("--threads", default="2,1", help="thread counts, one pass each (2,1)")
    parser.add_argument("--engines", default="", help="only those whose names contain one of these parts (all)")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "bench", help="environments, weights, results")
    parser.add_argument(
        "--precedence", action="store_true", help="other work of this machine waits for what is measured (as root)"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        bench = parts.Bench(
            build=options.build, engines=find_engines(options.engines), rounds=options.rounds,
            threads=tuple(int(part) for part in options.threads.split(",")), say=_say,
            has_precedence=options.precedence,
        )  # fmt: skip
        chosen = [_check_part(part) for part in options.part]
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would not hear Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for part in chosen:
            _say(f"== {part}")
            bench.run(part)
    except KeyboardInterrupt:
        _say("interrupted: what was not finished is not in the results")
        return 130
    except parts.BenchFailed as error:
        _say(f"error: {error}")
        return 1
    return 0


def _check_part(part: str) -> str:
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r}; there are: {', '.join(PARTS)}")
    return part


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
