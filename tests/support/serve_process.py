"""`baton serve` as a process in a session of its own: started, watched, ended, checked for what it leaves."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from cluster import runtime
from cluster.env import RUN_VARIABLE

START_S = 120.0
END_S = 5.0
"""What the product promises."""
SETTLE_S = 5.0
FAKES = ("-m", "tests.support.serve_fakes")
SHARED_MEMORY = Path("/dev/shm")
TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


def wait_for(what: str, condition: Callable[[], object], timeout_s: float = 30.0) -> object:
    """The first truthy value of `condition`; AssertionError when none came in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        threading.Event().wait(0.05)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServeProcess:
    """One start. With `terminal` it has a controlling terminal that `hang_up` closes."""

    def __init__(
        self,
        port: int,
        *,
        config: str = "laptop",
        terminal: bool = False,
        environ: dict | None = None,
        is_real: bool = False,
        is_broken: bool = False,
        python: Path | str = sys.executable,
        place: Path | None = None,
    ) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.shared_before = set(SHARED_MEMORY.iterdir())
        self.output, self._terminal, self._stop_reading = "", None, threading.Event()
        real = ("-m", "cluster", "serve", "--config", config, "--port", str(port))
        fakes = (*FAKES, config, str(port), *(("broken",) if is_broken else ()))
        command = [str(python), *(real if is_real else fakes)]
        env = {**os.environ, **(environ or {})}
        settings = {"env": env, "cwd": place, "start_new_session": True, "stderr": subprocess.STDOUT}
        if terminal:
            self._terminal, inside = pty.openpty()
            command = [sys.executable, "-c", TAKE_TERMINAL, *command]
            self.process = subprocess.Popen(command, stdin=inside, stdout=inside, **settings)
            os.close(inside)
            source = self._terminal
        else:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **settings)
            source = self.process.stdout.fileno()
        self._reader = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._reader.start()

    def _read(self, source: int) -> None:
        """A blocked read would keep a closed terminal open, so it reads only what is there."""
        while not self._stop_reading.is_set():
            if not select.select([source], [], [], 0.05)[0]:
                continue
            try:
                block = os.read(source, 4096)
            except OSError:
                return
            if not block:
                return
            self.output += block.decode(errors="replace")

    def wait_ready(self) -> "ServeProcess":
        self.wait_output("Baton is ready")
        return self

    def wait_output(self, text: str) -> None:
        def seen() -> bool:
            assert self.process.poll() is None or text in self.output, (
                f"ended with {self.process.poll()}:\n{self.output}"
            )
            return text in self.output

        wait_for(f"{text!r} in the output", seen, START_S)

    def run_folder(self) -> runtime.RunFolder | None:
        mine = [folder for folder, owner in runtime.find_runs() if owner is not None and owner.pid == self.process.pid]
        return mine[0] if mine else None

    def processes(self) -> list[psutil.Process]:
        folder = self.run_folder()
        return runtime.processes_of(folder) if folder else []

    def get(self, path: str) -> object:
        return httpx.get(self.url + path, timeout=10, trust_env=False).json()

    def interrupt(self) -> None:
        """Ctrl-C in its terminal: the whole process group hears it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def hang_up(self) -> None:
        self._stop_reading.set()
        self._reader.join()
        os.close(self._terminal)
        self._terminal = None

    def end(self) -> None:
        """However a test left it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(3 * END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._stop_reading.set()
        self._reader.join(timeout=5)
        if self._terminal is not None:
            os.close(self._terminal)
        if self.process.stdout:
            self.process.stdout.close()
        runtime.sweep()

    def assert_ends_without_a_trace(self, folder: runtime.RunFolder | None, status: int | None = 0) -> None:
        started = time.monotonic()
        self.process.wait(timeout=2 * END_S)
        took = time.monotonic() - started
        assert took < END_S, f"took {took:.1f} s:\n{self.output}"
        assert status is None or self.process.returncode == status, self.output
        if folder is not None:
            wait_for("no process left", lambda: not marked_processes(folder), SETTLE_S)
            assert not folder.path.exists()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0
        assert set(SHARED_MEMORY.iterdir()) <= self.shared_before


def marked_processes(folder: runtime.RunFolder) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == str(folder.path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def read_events(response: httpx.Response) -> list[object]:
    """The data of a server-sent event stream, to its end; one that breaks off raises."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) if line.startswith("{") else line for line in lines]
