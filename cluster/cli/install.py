"""`make setup`: the virtual environment with everything in it, made once per pyproject.toml. Standard library only: it
runs before anything is installed.

    .venv/baton-setup      fingerprint of the pyproject.toml and the Python it was made with; equal = nothing to do
    .venv/baton-setup.log  pip's own words, shown only when it fails
"""

import fcntl
import hashlib
import json
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cluster.env import with_temp

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP, LOG = VENV / "baton-setup", VENV / "baton-setup.log"
PYTHON = VENV / "bin" / "python"
OLDEST, NEWEST = (3, 11), (3, 12)
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
GPU_SIGNS = ("/proc/driver/nvidia/version", "/dev/nvidia0")
CUDA_NOTICE = """
  note: pip offers the CUDA build of torch here (a download of about 2.7 GB), and this machine shows no NVIDIA GPU.
        Baton works with it, but the CPU build is far smaller. To choose it, stop now (Ctrl-C) and give pip the index of
        CPU wheels that PyTorch's installation page names, for instance once for this user:
            pip config set global.extra-index-url INDEX_OF_CPU_WHEELS
        then run make again.
"""


class SetupFailed(Exception):
    """Told to the user as it is."""


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with open(ROOT / "pyproject.toml", "rb") as pyproject:
            fcntl.flock(pyproject, fcntl.LOCK_EX)  # two at once would install into each other
            setup()
    except SetupFailed as error:
        print(f"setup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: stopped; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def setup() -> None:
    """The environment fits pyproject.toml. Starts no pip when it did already."""
    wanted = fingerprint((ROOT / "pyproject.toml").read_bytes())
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        raise SetupFailed(
            f"this is Python {platform.python_version()}; Baton needs 3.11 or 3.12: make PYTHON=python3.11"
        )
    if not (PYTHON.exists() and has_module("pip")):  # an interrupted one has no pip yet
        command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
        run_step("virtual environment", command, hint="on Debian: apt install python3-venv")
    if needs_cuda_notice(*torch_on_offer()):
        print(CUDA_NOTICE, flush=True)
    run_step(
        "packages (1.6 GB installed)",
        [*PIP, "install", "-e", f"{ROOT}[dev]"],
        hint="check the network and pip's index settings",
    )
    STAMP.write_text(wanted)


def fingerprint(pyproject: bytes) -> str:
    """Changes with pyproject.toml and with the Python that runs."""
    return f"{hashlib.sha256(pyproject).hexdigest()} {platform.python_version()}\n"


def torch_on_offer() -> tuple[str, list[str]]:
    """Version and requirements of the torch that pip would install; empty where pip cannot tell without a download."""
    if has_module("torch"):
        return "", []
    pins = [line for line in (ROOT / "pyproject.toml").read_text().split('"') if line.startswith("torch>")]
    command = [*PIP, "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", pins[0]]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found = json.loads(answer.stdout[answer.stdout.index("{") :])["install"][0]["metadata"]
    except (ValueError, LookupError):
        return "", []
    return found["version"], found.get("requires_dist", [])


def has_module(name: str) -> bool:
    return subprocess.run([str(PYTHON), "-c", f"import {name}"], capture_output=True, check=False).returncode == 0


def needs_cuda_notice(version: str, requirements: list[str], has_gpu: bool | None = None) -> bool:
    """Whether a CUDA build would be fetched for a machine that shows no GPU."""
    if has_gpu is None:
        has_gpu = any(Path(sign).exists() for sign in GPU_SIGNS) or shutil.which("nvidia-smi") is not None
    is_cuda = any(name.startswith(("nvidia-", "cuda-")) for name in requirements) and "+cpu" not in version
    return is_cuda and not has_gpu


def run_step(title: str, command: list[str], hint: str) -> None:
    """Runs a command with its output in the log and the elapsed time on the terminal. Raises `SetupFailed` with the
    last lines.
    """
    started, done, outcome = time.monotonic(), threading.Event(), ["!"]
    ticker = threading.Thread(target=tick, args=(title, started, done, outcome), daemon=True)
    ticker.start()
    scratch = ROOT / "build" / "setup"
    scratch.mkdir(parents=True, exist_ok=True)  # what an interrupted pip leaves goes with it
    try:
        output = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            env=with_temp(scratch),
        )
        if output.returncode == 0:
            outcome.append(".")
    finally:
        done.set()
        ticker.join()
        shutil.rmtree(scratch, ignore_errors=True)
    if VENV.is_dir():
        LOG.write_text(output.stdout)
    if output.returncode:
        told = "\n".join(line for line in output.stdout.splitlines() if " is ignored: " not in line)[-3000:]
        raise SetupFailed(f"{title} failed ({hint}):\n{told}")


def tick(title: str, started: float, done: threading.Event, outcome: list[str]) -> None:
    """The step's line, rewritten each second on a terminal, written at its start and end elsewhere."""
    is_tty = sys.stdout.isatty()
    if not is_tty:
        print(f"  : {title}", flush=True)
    while not done.wait(1.0):
        if is_tty:
            print(f"\r  : {title:<28} {time.monotonic() - started:6.1f} s", end="", flush=True)
    if is_tty:
        print("\r", end="")
    print(f"  {outcome[-1]} {title:<28} {time.monotonic() - started:6.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
