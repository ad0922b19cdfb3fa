"""`baton explain`: one real request on the running workers, followed through the nine stages. Loads no model."""

import argparse
import json

from cluster import runtime
from cluster.cli.client import add_url, ask, connect, find_url
from cluster.cli.explain_text import render_explain
from cluster.config import TargetsConfig, load_cluster
from cluster.diagnosis import Targets
from cluster.yaml_source import ConfigError

EXAMPLES = """examples:
  baton explain "Why is the sky blue?"
  baton explain "Name three colours." --temperature 0.8 --top-p 0.9 --seed 7
  baton explain "Why is the sky blue?" --json     everything the workers said, for scripts
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "explain",
        help="follow one request through every stage",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer in tokens (default: 32)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest up to this sum (default: 1)")
    parser.add_argument("--seed", type=int, default=None, help="the same draw every time")
    parser.add_argument("--json", action="store_true", help="the document as the server sent it")
    add_url(parser)
    parser.set_defaults(run=explain)


def explain(options: argparse.Namespace) -> int:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": options.prompt}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
    }
    if options.seed is not None:
        body["seed"] = options.seed
    url = find_url(options.url)
    with connect(url) as client:
        body["model"] = ask(client, "GET", "/v1/models")["data"][0]["id"]
        document = ask(client, "POST", "/baton/explain", body)
    print(json.dumps(document, indent=2) if options.json else render_explain(document, find_targets(url)))
    return 0


def find_targets(url: str) -> Targets:
    """The targets of the cluster that answers at `url`; the defaults where it does not run on this machine."""
    targets = TargetsConfig()
    for _, owner in runtime.find_runs():
        if owner is not None and owner.is_alive and url.endswith(f":{owner.port}"):
            try:
                targets = load_cluster(owner.config)[0].targets
            except ConfigError:
                break
    return Targets(ttft_ms=targets.ttft_ms, itl_ms=targets.itl_ms)
