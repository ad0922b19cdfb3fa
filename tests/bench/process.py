"""One engine in a process of its own: asked over JSON lines, stopped while others are measured, gone when closed."""

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUIT_S = 5.0


def take_precedence(pid: int) -> None:
    """Give the session of `pid` the largest share of the processor that the system gives: other work of the machine
    waits for it. Without the right to do so, or where sessions have no share, nothing changes.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text("-20")
    except OSError:
        return


class EngineFailed(Exception):
    """The engine answered an error, ended, or took longer than allowed; the text is the reason."""


class EngineProcess:
    """Spawned at once, in a session of its own. Everything is asked from one thread."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path, cpus: Sequence[int] = ()) -> None:
        """`cpus` restricts it to those cores. stderr, and what libraries print, go to `log`."""
        self._log = log
        self.spawned_at = time.monotonic()
        pinned = ["taskset", "-c", ",".join(map(str, cpus))] if cpus else []
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*pinned, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                env={**os.environ, **environ}, start_new_session=True,
            )  # fmt: skip
        self._unread = b""

    def ask(self, what: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """The answer; raises `EngineFailed`. The process runs during the call, paused or not before."""
        self.resume()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(f"ended before {what}: {self._last_words()}") from None
        answer = json.loads(self._read_line(what, timeout_s))
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return dict(answer)

    def pause(self) -> None:
        """Takes no processor time until asked again: what idle engines spin costs the others nothing."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def peak_memory_bytes(self) -> int:
        """The most it ever had resident; file pages it maps count."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
        return int(found[1]) * 1024 if found else 0

    def close(self) -> None:
        """Ended and reaped, whatever state it is in."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(QUIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def take_precedence(self) -> None:
        take_precedence(self._process.pid)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_line(self, what: str, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline, source = time.monotonic() + timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise EngineFailed(f"{what}: no answer within {timeout_s:.0f} s")
            part = os.read(source, 65536)
            if not part:
                raise EngineFailed(f"ended during {what}: {self._last_words()}")
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"
