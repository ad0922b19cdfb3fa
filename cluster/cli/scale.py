"""`baton scale`: a pool of the running server has another number of workers, and those that leave finish their streams.

The server is told the number; then the command watches until the workers that came are ready and those that went are
gone.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from cluster.cli.client import ServerUnreachable, add_url, ask, connect, find_url
from cluster.cli.progress import Steps, Terminal
from kv_transfer.pairing import PAIRS_MAX

EXAMPLES = """examples:
  baton scale decode 3              three decode workers; returns when all of them serve
  baton scale decode 1              back to one: the others finish their streams first
  baton scale prefill 2 --no-wait   do not wait for it
"""
DEFAULT_WAIT_S = 300.0
POLL_S = 0.2
QUICK_S = 10.0

Workers = Sequence[Mapping[str, Any]]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "scale",
        help="change the number of workers of a pool",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pool", help="name of the pool: prefill, decode or colocated")
    parser.add_argument("replicas", type=_count, help="how many workers it is to have, 1 to 64")
    parser.add_argument("--no-wait", action="store_true", help="return once the server knows")
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_WAIT_S, metavar="S", help="how long to wait (default: %(default)g s)"
    )
    add_url(parser)
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers; give one from 1 to 64")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    with connect(find_url(options.url), QUICK_S) as client:
        ask(client, "POST", "/baton/scale", {"pool": options.pool, "replicas": options.replicas})
        if options.no_wait:
            return 0
        with Steps(Terminal()).step(f"{options.pool} to {options.replicas}") as step:
            wait_for_size(lambda: _workers(client), options.pool, options.replicas, options.timeout, step.note)
    return 0


def _workers(client: httpx.Client) -> Workers:
    """Those the ingress knows; none while it does not answer."""
    try:
        found: Workers = client.get("/baton/status").json()["workers"]
    except (httpx.HTTPError, ValueError, KeyError):
        return ()
    return found


def wait_for_size(
    workers: Callable[[], Workers], pool: str, replicas: int, timeout_s: float, note: Callable[[str], None]
) -> None:
    """The pool has `replicas` ready workers that everybody reaches, and none that is leaving.

    Raises `ServerUnreachable` with what is missing after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while (missing := describe_missing(workers(), pool, replicas)) is not None:
        note(missing)
        if time.monotonic() > deadline:
            raise ServerUnreachable(
                f"{pool} after {timeout_s:g} s: {missing}; the server goes on with it, `baton status` shows how far"
            )
        time.sleep(POLL_S)
    note(f"{replicas} ready")


def describe_missing(workers: Workers, pool: str, replicas: int) -> str | None:
    """None once the pool is as asked, else how far it is. Pure."""
    own = [worker for worker in workers if worker["pool"] == pool]
    ready = [worker for worker in own if worker["listed"] and worker["state"] == "ready"]
    leaving = [worker for worker in own if not worker["listed"]]
    if leaving or len(ready) > replicas:
        running = sum(worker["running"] or 0 for worker in leaving)
        return f"{len(leaving)} leaving, {running} streams to finish" if leaving else f"{len(ready)} of {replicas}"
    if len(ready) < replicas:
        return f"{len(ready)} of {replicas} ready"
    return _describe_lanes(workers)


def _describe_lanes(workers: Workers) -> str | None:
    """A decode worker takes a prompt from those prefill workers alone that it has a warm lane to."""
    listed = [worker for worker in workers if worker["listed"]]
    sources = {worker["incarnation"] for worker in listed if worker["pool"] == "prefill"}
    for worker in listed:
        warm = sources & set(worker.get("open_lanes") or ())
        if worker["pool"] == "decode" and len(warm) < min(len(sources), PAIRS_MAX):
            return "warming lanes"
    return None
