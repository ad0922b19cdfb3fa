"""A prefill and a decode worker in processes of their own, wired without Ray, for tests of the whole path."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from kv_transfer.wire import KeyRing
from workers.protocol import Role, WorkerEndpoint

ROOT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    """One replica; `endpoint` waits until it is up."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.worker_process", json.dumps(config)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self._endpoint: WorkerEndpoint | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def endpoint(self) -> WorkerEndpoint:
        if self._endpoint is None:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            assert line, f"worker {self.config['role']} ended with {self._process.wait(10)} before it was ready"
            self._endpoint = WorkerEndpoint(**json.loads(line))
        return self._endpoint

    def set_sources(self, sources: list[WorkerEndpoint]) -> None:
        assert self._process.stdin is not None
        document = {"sources": [[s.incarnation, s.host, s.kv_port] for s in sources]}
        self._process.stdin.write(json.dumps(document) + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> int:
        """Ends the worker as a drain does; its exit code is 0 only when its block pool was in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue


class LocalCluster:
    """Workers by role; use as a context manager. `settings` are fields of ReplicaConfig for every worker."""

    def __init__(
        self, folder: Path, model_path: Path, roles: tuple[Role, ...] = ("prefill", "decode"), **settings: Any
    ) -> None:
        self.secret_path = folder / "secret"
        if not self.secret_path.exists():
            KeyRing.write_new(self.secret_path)
        base = {
            "model_path": str(model_path),
            "model_id": "test-model",
            "secret_path": str(self.secret_path),
            **settings,
        }
        self._configs = {role: {**base, "role": role} for role in roles}
        self.workers: dict[Role, WorkerProcess] = {}

    def __enter__(self) -> "LocalCluster":
        for role, config in self._configs.items():
            self.workers[role] = WorkerProcess(config)
        self.wire()
        return self

    def wire(self) -> None:
        """Tells decode about prefill, as the membership does."""
        if "prefill" in self.workers and "decode" in self.workers:
            self.workers["decode"].set_sources([self.workers["prefill"].endpoint])

    def restart(self, role: Role) -> None:
        """kill -9 and a new process with a new incarnation."""
        self.workers[role].kill()
        self.workers[role] = WorkerProcess(self._configs[role])
        self.wire()

    @property
    def ring(self) -> KeyRing:
        return KeyRing.load(self.secret_path)

    @property
    def endpoints(self) -> list[WorkerEndpoint]:
        return [worker.endpoint for worker in self.workers.values()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        codes = {}
        for role, worker in self.workers.items():
            try:
                codes[role] = worker.stop()
            except (subprocess.TimeoutExpired, BrokenPipeError) as failure:
                codes[role] = repr(failure)
        if kind is None:
            assert set(codes.values()) <= {0}, f"a worker ended badly: {codes}"
