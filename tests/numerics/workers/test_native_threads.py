"""Threads of the native backend: asleep when nothing runs, and right whoever else runs beside them."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.native_runs import load_native, logits_in_pieces, logits_whole
from tests.support.tiny_models import save_tiny
from workers.model.decoder import Decoder

pytestmark = pytest.mark.numerics

TEXT = [(7 * i + 3) % 60 for i in range(60)]
SIZES = [1, 2, 7] + [1] * 30 + [20]
WINDOW_S = 0.2
DEADLINE_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path)
    return tmp_path


def cpu_share() -> float:
    """Of one core, by this whole process, over WINDOW_S in which this thread sleeps."""
    began, wall = time.process_time(), time.monotonic()
    time.sleep(WINDOW_S)
    return (time.process_time() - began) / (time.monotonic() - wall)


def comes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if condition():
            return True
    return condition()


def test_an_idle_engine_burns_nothing(model: Path) -> None:
    decoder = load_native(model, "q4", 4)
    logits_whole(decoder, "bf16", TEXT)
    assert comes_true(lambda: cpu_share() < 0.02)


def test_two_engines_at_once(model: Path) -> None:
    engines = [load_native(model, "q4", 3) for _ in range(2)]
    expected = logits_whole(engines[0], "bf16", TEXT)

    def run_often(decoder: Decoder) -> bool:
        return all(torch.equal(logits_in_pieces(decoder, "bf16", TEXT, SIZES), expected) for _ in range(3))

    with ThreadPoolExecutor(len(engines)) as executor:
        assert all(executor.map(run_often, engines, timeout=DEADLINE_S))


def test_more_threads_than_cores(model: Path) -> None:
    alone, crowded = load_native(model, "q4", 1), load_native(model, "q4", 9)
    expected = logits_whole(alone, "bf16", TEXT)
    assert torch.equal(logits_whole(crowded, "bf16", TEXT), expected)
    assert torch.equal(logits_in_pieces(crowded, "bf16", TEXT, SIZES), expected)
