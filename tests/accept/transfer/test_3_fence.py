"""Line 3, the fence: blocks that were revoked and reused at once under a late writer of shared memory stay as their new
owner left them; without the fence they do not."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.copies import CacheShape
from kv_transfer.lane import BlobExchange
from kv_transfer.pool import SharedPool
from kv_transfer.transports import shm
from kv_transfer.transports.shm import ShmTarget, ShmTransport
from tests.support.late_writer import FENCE_KEY, LAYOUT, NUM_BLOCKS, Mode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Owner:
    """Decode's half, reduced to its pool and one grant at a time."""

    blocks: np.ndarray
    target: ShmTarget


@pytest.fixture
def start_writer(tmp_path: Path) -> Iterator[Callable[[Mode], Owner]]:
    processes: list[subprocess.Popen[bytes]] = []
    pool = SharedPool()

    def start(mode: Mode) -> Owner:
        memory = pool.allocate(CacheShape(LAYOUT, NUM_BLOCKS).num_bytes)
        with Listener(str(tmp_path / "writer"), authkey=FENCE_KEY) as listener:
            command = [sys.executable, "-m", "tests.support.late_writer", str(tmp_path / "writer"), mode]
            processes.append(subprocess.Popen(command, cwd=ROOT))
            connection = listener.accept()
        exchange = BlobExchange(lambda blob: (connection.send_bytes(blob), exchange.feed(connection.recv_bytes()))[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shm, "OPEN_TIMEOUT_S", 60.0)
            target = ShmTransport(pool).open(0, b"lane-one", exchange)
        connection.close()
        assert isinstance(target, ShmTarget)
        return Owner(memory.reshape(NUM_BLOCKS, -1), target)

    yield start
    for process in processes:
        process.kill()
        process.wait(10)
    pool.close()


@dataclass
class Outcome:
    reused: int = 0
    corrupted: int = 0
    quarantined: int = 0
    written: int = 0


def revoke_and_reuse(owner: Owner, num_blocks: int, seed: int, is_enough: Callable[[Outcome], bool]) -> Outcome:
    """Grants all blocks, revokes them at a random moment of the write, and hands each that is not in quarantine to
    another owner at once, who fills it with 0 and later looks whether it still is."""
    dice, outcome, newest = random.Random(seed), Outcome(), 0
    while outcome.reused < num_blocks and not is_enough(outcome):
        owner.blocks[:, -1] = 0
        newest = owner.target.grant(newest) or 0
        assert newest, "the fence has no room"
        spin(dice.random() * 8e-4)
        window = owner.target.revoke(newest)
        held = {window.page} if window is not None else set()
        reused = [block for block in range(NUM_BLOCKS) if block not in held]
        outcome.written += int(np.count_nonzero(owner.blocks[:, -1]))
        owner.blocks[reused, -1] = 0
        deadline = time.monotonic() + 5
        while not owner.target.is_proven(newest):
            assert time.monotonic() < deadline, "a window that lasts"
        proven = sorted(held)
        owner.blocks[proven, -1] = 0  # from the proof on these are free, too
        spin(3e-4)
        outcome.corrupted += int(np.count_nonzero(owner.blocks[:, -1]))
        outcome.reused += NUM_BLOCKS
        outcome.quarantined += len(held)
        owner.target.release(newest)
    return outcome


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_revoked_blocks_are_reused_at_once_under_a_late_writer(start_writer, is_full: bool):
    num_blocks = 100_000 if is_full else 12_000
    outcome = revoke_and_reuse(start_writer("fence"), num_blocks, 1, lambda outcome: False)
    print(outcome)
    assert outcome.corrupted == 0
    assert outcome.written > num_blocks // 50, "the writer was never at work when its grant ended"
    assert outcome.quarantined > 0, "no revoke met an open window: the test proves nothing"


def test_without_the_fence_the_same_test_fails(start_writer):
    outcome = revoke_and_reuse(start_writer("check"), 100_000, 1, lambda outcome: outcome.corrupted > 0)
    print(outcome)
    assert outcome.corrupted > 0, "a generation that is checked before the copy should not be enough"
