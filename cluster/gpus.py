"""The NVIDIA GPUs of this machine and whether our torch can use them, without importing torch."""

import importlib.metadata
import importlib.util
import subprocess
from dataclasses import dataclass, replace

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
TIMEOUT_S = 10.0
"""A driver in trouble answers late or never."""


@dataclass(frozen=True, slots=True)
class Gpus:
    memory_bytes: tuple[int, ...] = ()
    """Of each GPU that can be used."""
    fault: str = "no NVIDIA GPU was looked for"
    """Why there is none; empty where there is."""
    attention: str = "gather + SDPA"
    """What attends over the paged cache there, as far as installed packages tell."""


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
    return replace(parse_answer(answer.returncode, answer.stdout), attention=describe_attention())


def describe_attention() -> str:
    """By the order in which `workers/ops/select.py` tries; a worker's log says what it took in the end, and why."""
    packages = {"flash_attn_interface": "flash-attn 3", "flashinfer": "FlashInfer"}
    for module, name in packages.items():
        if importlib.util.find_spec(module) is not None:
            return f"{name}, gather + SDPA for what it lacks"
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn 2 with blocks of 256 tokens, otherwise gather + SDPA"
    return "gather + SDPA (flashinfer and flash-attn are not installed)"


def parse_answer(status: int, text: str) -> Gpus:
    """What nvidia-smi said: one line of MiB per GPU."""
    sizes = [line.strip() for line in text.splitlines() if line.strip()]
    if status or not sizes:
        return Gpus(fault=f"no NVIDIA GPU: nvidia-smi ended with {status} and listed none")
    if not all(size.isdigit() for size in sizes):
        return Gpus(fault=f"nvidia-smi does not tell the memory of a GPU: {sizes[0][:40]!r}")
    return Gpus(tuple(int(size) << 20 for size in sizes), fault="")
