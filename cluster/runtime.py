"""What one run of `baton serve` leaves on the machine, and how it is removed again: by itself, or by the next start.

    <temp>/baton-<pid>-<random>/      0700
        owner.json                    pid, start time, port and checkout of the driver
        secret                        0600, the cluster's key ring, minted per run
        ray/                          Ray's sessions, logs and sockets (the path is kept short: sockets allow 104 bytes)
        tmp/                          TMPDIR of every process of the run

Every process of a run carries the folder's path in its environment (`cluster.env.RUN_VARIABLE`), so that what survives
a killed driver is recognised without guessing. Knows no Ray.
"""

import dataclasses
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.env import RUN_VARIABLE
from kv_transfer.wire import KeyRing

PREFIX = "baton-"
MAX_TEMP_CHARS = 24
"""A longer temporary folder makes Ray's socket paths too long."""
START_TIME_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def secret_path(self) -> Path:
        return self.path / "secret"

    @property
    def ray_dir(self) -> Path:
        return self.path / "ray"

    def create(self, port: int, config: str) -> None:
        """The folder exists, owned by this process, with a freshly minted secret."""
        self.path.mkdir(mode=0o700)
        owner = Owner(os.getpid(), psutil.Process().create_time(), port, config, this_checkout())
        (self.path / "owner.json").write_text(json.dumps(dataclasses.asdict(owner)))
        (self.path / "tmp").mkdir()
        self.ray_dir.mkdir()
        KeyRing.write_new(self.secret_path)

    def remove(self) -> None:
        """The folder is gone; a process that still writes into it is given a second chance to fail."""
        for _ in range(3):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                return


@dataclass(frozen=True, slots=True)
class Owner:
    """The driver of a run."""

    pid: int
    started_s: float
    port: int
    config: str
    checkout: str = ""
    """Where its code stands."""

    @property
    def is_alive(self) -> bool:
        try:
            started_s: float = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        return abs(started_s - self.started_s) < START_TIME_SLACK_S


@dataclass(frozen=True, slots=True)
class Swept:
    """What a start removed of dead runs."""

    num_folders: int
    num_processes: int


def this_checkout() -> str:
    """Where this code stands: two checkouts on one machine are told apart by it."""
    return str(Path(__file__).resolve().parent.parent)


def temp_root() -> Path:
    """The folder of run folders: the system's temporary one where its path is short enough, otherwise /tmp."""
    root = tempfile.gettempdir()
    return Path(root if len(root) <= MAX_TEMP_CHARS else "/tmp")


def name_run(root: Path | None = None) -> RunFolder:
    """The run folder of this process, not created yet: whoever ends the run knows it before it exists."""
    return RunFolder((root or temp_root()) / f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}")


def find_runs(root: Path | None = None) -> Iterator[tuple[RunFolder, Owner | None]]:
    """The run folders of this user; None where the owner has not been written yet or is unreadable."""
    for path in sorted((root or temp_root()).glob(f"{PREFIX}[0-9]*-*")):
        if _is_ours(path):
            yield RunFolder(path), _read_owner(path)


def _is_ours(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _read_owner(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads((path / "owner.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def sweep(root: Path | None = None) -> Swept:
    """Folders and processes of runs whose driver is dead are gone. A run that is just starting is left alone."""
    dead = [folder for folder, owner in find_runs(root) if not _lives(folder, owner)]
    num_processes = sum(end_processes(folder) for folder in dead)
    for folder in dead:
        folder.remove()
    return Swept(len(dead), num_processes)


def _lives(folder: RunFolder, owner: Owner | None) -> bool:
    if owner is not None:
        return owner.is_alive
    pid = folder.path.name.removeprefix(PREFIX).partition("-")[0]
    return pid.isdigit() and psutil.pid_exists(int(pid))


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """The living processes of a run, its driver excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_VARIABLE) == str(folder.path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if process.pid != os.getpid()]


def end_processes(folder: RunFolder, timeout_s: float = 3.0) -> int:
    """No process of the run is left, or `timeout_s` has passed; returns how many there were. They are killed at
    once.
    """
    deadline, ended = time.monotonic() + timeout_s, set()
    while left := processes_of(folder):
        for process in left:
            ended.add(process.pid)
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if time.monotonic() > deadline:
            break
        psutil.wait_procs(left, timeout=0.2)
    return len(ended)
