"""The real cluster, started as a user starts it, for the acceptance lines that need Ray."""

import threading
from pathlib import Path
from typing import Any

import httpx

from kv_transfer.wire import KeyRing
from tests.support.observer import watch_load
from tests.support.serve_process import ServeProcess, free_port, wait_for
from workers.protocol import Load


class RealServer(ServeProcess):
    """`baton serve` with the shipped model and the laptop configuration."""

    def __init__(self, port: int | None = None, config: str = "laptop") -> None:
        super().__init__(port or free_port(), config=config, is_real=True)
        self.is_observed = threading.Event()

    def status(self) -> dict[str, Any]:
        response = httpx.get(self.url + "/baton/status", timeout=10, trust_env=False)
        response.raise_for_status()
        return dict(response.json())

    def workers(self) -> list[dict[str, Any]]:
        """Listed workers; empty while no ingress answers."""
        try:
            return [w for w in self.status()["workers"] if w["listed"]]
        except (httpx.HTTPError, KeyError, ValueError):
            return []

    def worker(self, pool: str) -> dict[str, Any]:
        found = [w for w in self.workers() if w["pool"] == pool and w["pid"]]
        return found[-1] if found else {"pid": 0, "queued_tokens": 0}

    def wait_replaced(self, pool: str, old_pid: int) -> None:
        def is_replaced() -> bool:
            return self.worker(pool)["pid"] not in (0, old_pid) and self.is_healthy()

        wait_for(f"a new {pool} worker serves", is_replaced, 60.0)

    def is_healthy(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_healthy(self) -> None:
        wait_for("/health is 200", self.is_healthy, 60.0)

    def wait_idle(self) -> None:
        def is_idle() -> bool:
            workers = self.workers()
            used = [w["blocks_in_use"] or w["blocks_quarantined"] or w["running"] or w["waiting"] for w in workers]
            return bool(workers) and not any(used)

        wait_for("every block is back", is_idle, 15.0)

    def ingress_pid(self) -> int:
        (found,) = [
            p for p in self.processes() if any("ServeReplica" in part and "ingress" in part for part in p.cmdline())
        ]
        return int(found.pid)

    def wait_worker_idle(self, pid: int, timeout_s: float) -> float:
        """The monotonic time at which the worker says by itself that nothing runs, waits or is held."""
        folder = self.run_folder()
        assert folder is not None
        ring = KeyRing.load(Path(folder.secret_path))
        self.is_observed.clear()
        return watch_load(ring, pid, _is_idle, timeout_s, self.is_observed)


def _is_idle(load: Load) -> bool:
    return not load.running and not load.waiting and load.blocks_free == load.blocks_total
