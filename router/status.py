"""The pools as a document for people and scripts, and the answer to "can a token be produced". Pure."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from router.worker_view import Need, Route, WaitLabel, WorkerSnapshot, decide_route


def describe_worker(worker: WorkerSnapshot) -> dict[str, object]:
    """Blocks and counters are those of the last LOAD; null before the first one of this connection."""
    identity, load = worker.identity, worker.load
    state = "unreachable" if load is None else "suspect" if worker.is_suspect else load.state
    facts: dict[str, object] = {
        "pool": worker.role,
        "role": worker.role,
        "incarnation": f"{worker.incarnation:016x}",
        "pid": identity.pid if identity else None,
        "ranks": identity.ranks if identity else None,
        "state": state,
        "listed": worker.is_listed,
    }
    if identity is not None:
        facts |= {
            "model_digest": identity.model_digest,
            "block_tokens": identity.block_tokens,
            "kv_bytes_per_token": identity.kv_bytes_per_token,
            "max_context_tokens": identity.max_context_tokens,
        }
    if load is None:
        return facts | dict.fromkeys(("blocks_total", "blocks_in_use", "blocks_quarantined", "running", "waiting"))
    return facts | {
        "blocks_total": load.blocks_total,
        "blocks_cached": load.blocks_cached,
        "blocks_in_use": load.blocks_total - load.blocks_free - load.blocks_quarantined,
        "blocks_quarantined": load.blocks_quarantined,
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "itl_us": load.itl_us,
        "kv_over": list(load.kv_over),
        "open_lanes": [f"{lane:016x}" for lane in load.open_lanes],
        "computed_prompt_tokens": dataclasses.asdict(load.computed_prompt),
    }


def find_missing(workers: Sequence[WorkerSnapshot], disaggregation: Literal["always", "never"]) -> WaitLabel | None:
    """None when a token can be produced now or after those before it, else what is missing."""
    rested = [dataclasses.replace(w, is_refusing=False) for w in workers]
    route = decide_route(rested, Need(1, 1), disaggregation, lambda: 0.0)
    if isinstance(route, Route) or route.label in ("decode_blocks", "prefill_time"):
        return None
    return route.label
