"""Environments of the peers, one each under build/bench/venvs, made by pip on demand and kept."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.bench.engines import Package

INSTALL_LIMIT_S = 3600.0
Say = Callable[[str], None]


class NotInstalled(Exception):
    """The text is the reason."""


def install(package: Package, venvs: Path, say: Say) -> Path:
    """Its folder, with a stamp of what is in it: the second call does nothing. Raises `NotInstalled`.

    pip and not uv: pip's own settings name the CPU build of torch where the machine has one.
    """
    folder = venvs / package.name
    stamp, wanted = folder / "installed.txt", "\n".join((*package.requirements, *package.without))
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    say(f"installing {package.name} (about {package.seconds})")
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin" / "python")
    log = venvs / f"{package.name}.log"
    venvs.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], log, {})
    _run([python, "-m", "pip", "install", "-q", *package.requirements], log, package.environ)
    if package.without:
        _run([python, "-m", "pip", "uninstall", "-q", "-y", *package.without], log, {})
    stamp.write_text(wanted)
    return folder


def versions(package: Package, venvs: Path) -> dict[str, str]:
    """What pip lists there, by names as the registry writes them."""
    python = str(venvs / package.name / "bin" / "python")
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=False, timeout=120
    ).stdout
    pairs = (line.split("==", 1) for line in listed.splitlines() if "==" in line)
    return {name.replace("_", "-").lower(): version for name, version in pairs}


def _run(command: list[str], log: Path, environ: dict[str, str]) -> None:
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **environ},
                check=False, timeout=INSTALL_LIMIT_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(f"{' '.join(command[:4])}: {type(error).__name__}") from None
    if done.returncode:
        lines = [
            line for line in log.read_text(errors="replace").splitlines() if "ignored" not in line and line.strip()
        ]
        errors = [line for line in lines if "rror" in line] or lines
        raise NotInstalled(f"pip: {errors[-1].strip()[:200]}" if errors else f"{command[0]} exits {done.returncode}")
