import importlib.metadata
import importlib.util
import subprocess

import pytest

from cluster import gpus
from cluster.gpus import find_gpus, parse_answer


def test_memory_of_each_gpu() -> None:
    found = parse_answer(0, "143771\n143771\n")
    assert found.memory_bytes == (143771 << 20, 143771 << 20)
    assert found.fault == ""


@pytest.mark.parametrize(
    ("status", "text", "fault"),
    [
        (9, "NVIDIA-SMI has failed", "no NVIDIA GPU: nvidia-smi ended with 9"),
        (0, "", "no NVIDIA GPU: nvidia-smi ended with 0"),
        (0, "[N/A]\n", "does not tell the memory"),
    ],
)
def test_no_gpu_and_why(status: int, text: str, fault: str) -> None:
    found = parse_answer(status, text)
    assert found.memory_bytes == ()
    assert fault in found.fault


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("flash_attn_interface", "flash-attn 3, gather + SDPA for what it lacks"),
        ("flashinfer", "FlashInfer, gather + SDPA for what it lacks"),
        ("flash_attn", "flash-attn 2 with blocks of 256 tokens, otherwise gather + SDPA"),
        ("", "gather + SDPA (flashinfer and flash-attn are not installed)"),
    ],
)
def test_what_attends(monkeypatch: pytest.MonkeyPatch, installed: str, said: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == installed else None)
    assert gpus.describe_attention() == said


def test_a_torch_for_the_cpu_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert find_gpus().fault == "torch 2.13.0+cpu is built for the CPU alone"


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(gpus, "QUERY", ("no-such-program-of-baton",))
    assert "nvidia-smi is not installed" in find_gpus().fault

    def hang(*args: object, **rest: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(subprocess, "run", hang)
    assert find_gpus().fault == "nvidia-smi did not answer: TimeoutExpired"
