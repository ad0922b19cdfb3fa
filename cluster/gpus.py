"""The NVIDIA GPUs of this machine and whether our torch can use them, without importing torch."""

import importlib.metadata
import subprocess
from dataclasses import dataclass

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
TIMEOUT_S = 10.0
"""A driver in trouble answers late or never."""


@dataclass(frozen=True, slots=True)
class Gpus:
    memory_bytes: tuple[int, ...] = ()
    """Of each GPU that can be used."""
    fault: str = "no NVIDIA GPU was looked for"
    """Why there is none; empty where there is."""


NO_GPUS = Gpus()


def find_gpus() -> Gpus:
    """Takes as long as nvidia-smi: up to a second."""
    build = importlib.metadata.version("torch")
    if build.endswith("+cpu"):
        return Gpus(fault=f"torch {build} is built for the CPU alone")
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        return Gpus(fault="no NVIDIA GPU: nvidia-smi is not installed")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(fault=f"nvidia-smi did not answer: {type(error).__name__}")
    return parse_answer(answer.returncode, answer.stdout)


def parse_answer(status: int, text: str) -> Gpus:
    """What nvidia-smi said: one line of MiB per GPU."""
    sizes = [line.strip() for line in text.splitlines() if line.strip()]
    if status or not sizes:
        return Gpus(fault=f"no NVIDIA GPU: nvidia-smi ended with {status} and listed none")
    if not all(size.isdigit() for size in sizes):
        return Gpus(fault=f"nvidia-smi does not tell the memory of a GPU: {sizes[0][:40]!r}")
    return Gpus(tuple(int(size) << 20 for size in sizes), fault="")
