"""`baton fetch`: the model is on this machine afterwards, and nothing was started."""

import argparse

from cluster import env
from cluster.cli.progress import Steps, Terminal
from cluster.config import load_cluster
from cluster.model_store import ensure_model

EXAMPLES = """examples:
  baton fetch             the model of the laptop cluster
  baton fetch mine.yaml   the model of another cluster
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "fetch",
        help="download and convert the model of a cluster",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", nargs="?", default="laptop", help="a file of configs/clusters, or a path (default: laptop)"
    )
    parser.set_defaults(run=lambda options: fetch(options.name))


def fetch(name: str) -> int:
    _, model = load_cluster(name)
    with Steps(Terminal()).step("model") as step:
        step.note(str(ensure_model(model, env.cache_dir(), step.progress)))
    return 0
