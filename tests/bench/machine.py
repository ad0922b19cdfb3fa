"""Facts of the machine and of what ran on it: every number of a bench is a number of that machine."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

from tests.bench.engines import ROOT
from workers.native import build

FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


def machine_facts() -> dict[str, str]:
    processor = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next(
        (line.split(":", 1)[1].strip() for line in processor.splitlines() if line.startswith("model name")), "?"
    )
    has = next((line.split() for line in processor.splitlines() if line.startswith("flags")), [])
    family = [
        line.split(":", 1)[1].strip() for line in processor.splitlines() if line.startswith(("cpu family", "model\t"))
    ]
    return {
        "processor": f"{model}, family {'/'.join(family[:2])}",
        "cores": str(psutil.cpu_count()),
        "instructions": ", ".join(flag for flag in FLAGS if flag in has),
        "last level cache": _last_level_cache(),
        "memory": f"{psutil.virtual_memory().total / (1 << 30):.0f} GiB",
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
    }


def own_versions() -> dict[str, str]:
    outcome = build.read_outcome()
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "baton": head or "no git",
        "native sources": build.hash_sources()[:12],
        "compiler": outcome.compiler.rsplit("/", 1)[-1] if outcome else "none",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ray", "transformers")},
    }


def load_average() -> float:
    return psutil.getloadavg()[0]


def _last_level_cache() -> str:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    return f"L{_read(str(sizes[-1] / 'level'))} {_read(str(sizes[-1] / 'size'))}" if sizes else "?"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "?"
