"""Baton as pip installs it on a machine without a C++ compiler: a wheel built there, in an environment of its own.

The other packages are those of the environment that runs the tests.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

from workers.native.build import COMPILERS, REPORT

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("cluster", "workers", "router", "kv_transfer", "configs")
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
BUILT = ("*.so", REPORT.name, "__pycache__", ".build-*")


class BareInstall:
    """Made in `folder` in some seconds."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "elsewhere"
        """Where to run: no package of ours lies here, so that what is imported is what was installed."""
        self.place.mkdir()
        self._bin = _link_commands(folder / "bin")
        self.python = folder / "venv" / "bin" / "python"
        self.environ = {
            **os.environ, "PATH": f"{self.python.parent}:{self._bin}", "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"
        }  # fmt: skip
        self.wheel = self._build_wheel(folder / "source", folder / "wheels")
        self._install(folder / "venv")

    def _build_wheel(self, source: Path, wheels: Path) -> Path:
        for name in SOURCES:
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*BUILT))
        for name in FILES:
            shutil.copy(ROOT / name, source / name)
        self.run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source)
        (wheel,) = wheels.glob("*.whl")
        return wheel

    def _install(self, venv: Path) -> None:
        self.run(sys.executable, "-m", "venv", "--without-pip", venv)
        self.run(
            sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", "--no-index", self.wheel
        )
        (packages,) = venv.glob("lib/python3*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *command: object, timeout_s: float = 120.0) -> str:
        done = subprocess.run(
            [str(part) for part in command], cwd=self.place, env=self.environ, text=True, timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}")
        return done.stdout

    def read_report(self) -> dict[str, Any]:
        """What the build of the kernels told, from the wheel."""
        with zipfile.ZipFile(self.wheel) as wheel:
            return dict(json.loads(wheel.read(f"workers/native/{REPORT.name}")))

    def names(self) -> list[str]:
        with zipfile.ZipFile(self.wheel) as wheel:
            return wheel.namelist()


def _link_commands(folder: Path) -> Path:
    """Every command of this machine but its compilers."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for command in Path(place).iterdir() if Path(place).is_dir() else ():
            if command.name not in COMPILERS and not (folder / command.name).is_symlink():
                (folder / command.name).symlink_to(command)
    return folder
