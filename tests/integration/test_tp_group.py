"""A tensor-parallel group of real processes over gloo: tokens, and an end of all when one ends."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kv_transfer.errors import TransferError
from kv_transfer.layout import NULL_BLOCK
from kv_transfer.wire import KeyRing
from tests.support.oracle import expect
from tests.support.rank_process import spawn_rank
from tests.support.replay import replay
from tests.support.tiny_models import save_tiny
from workers.engine.config import EngineConfig
from workers.engine.plan import Chunk, StepPlan, ignore_layer
from workers.protocol import SamplingParams, StreamKey
from workers.replica import tp_group
from workers.replica.tp_group import GroupConfig, GroupLeader, GroupRunner, decode_plan, encode_plan
from workers.runner.model_runner import ModelRunner

LENGTHS = (1, 3, 8, 17, 31, 60)
NEW_TOKENS = 8
BLOCKS = 120


def make_config(folder: Path, num_ranks: int) -> GroupConfig:
    secret = folder / "secret"
    if not secret.exists():
        KeyRing.write_new(secret)
    return GroupConfig(
        folder=folder, mode="fp32", kv_dtype="fp32", block_tokens=4, num_blocks=BLOCKS, max_context_tokens=128,
        backend="reference", num_threads=1, num_ranks=num_ranks, host="127.0.0.1", secret_path=secret,
    )  # fmt: skip


class Group:
    """A leader in this process and ranks in others."""

    def __init__(self, config: GroupConfig) -> None:
        self.lost: list[int] = []
        self.is_lost = threading.Event()
        self.leader = GroupLeader(config, self._hear)
        self.ranks = [spawn_rank(config, rank, self.leader.port) for rank in range(1, config.num_ranks)]
        model = self.leader.start()
        self.runner = GroupRunner(self.leader, ModelRunner(model.decoder, model.cache))

    def _hear(self, rank: int) -> None:
        self.lost.append(rank)
        self.is_lost.set()

    def close(self) -> list[int]:
        """The ranks' exit codes."""
        self.leader.close()
        try:
            return [rank.wait(20) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.kill()


@contextmanager
def run_group(folder: Path, num_ranks: int) -> Iterator[Group]:
    torch.set_num_threads(1)
    group = Group(make_config(folder, num_ranks))
    try:
        yield group
    finally:
        group.close()


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "num_ranks"), [("llama", 2), ("mixtral", 2), ("llama", 3)])
def test_tokens_equal_transformers(tmp_path: Path, kind: str, num_ranks: int) -> None:
    save_tiny(kind, tmp_path, jitter=0.2, eos_token_id=None)
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(3, 211, (n,), generator=generator).tolist()) for n in LENGTHS]
    config = EngineConfig(block_tokens=4, num_blocks=BLOCKS, chunk_tokens=24, max_running=16, max_context_tokens=128)
    with run_group(tmp_path, num_ranks) as group:
        tokens = replay(group.runner, config, prompts, NEW_TOKENS, 2).tokens
        assert tokens == [list(expect(tmp_path, prompt, NEW_TOKENS).tokens) for prompt in prompts]
        assert group.close() == [0] * (num_ranks - 1)
        assert group.lost == []


@pytest.mark.integration
def test_a_killed_rank_is_heard_at_once_and_ends_the_others(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with run_group(tmp_path, 3) as group:
        first, second = group.ranks
        started = time.monotonic()
        os.kill(first.pid, signal.SIGKILL)
        assert group.is_lost.wait(5)
        assert time.monotonic() - started < 1.0
        assert group.lost == [1]
        with pytest.raises(TransferError):
            group.runner.execute(StepPlan((chunk((5, 6)),)), ignore_layer)
        group.leader.close()
        assert second.wait(20) == 0


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(tp_group, "START_TIMEOUT_S", 0.2)
    leader = GroupLeader(make_config(tmp_path, 3), lambda rank: None)
    with pytest.raises(TransferError, match="0 of 2 ranks came in time"):
        leader.start()
    leader.close()


@pytest.mark.integration
def test_a_stranger_is_turned_away(tmp_path: Path) -> None:
    """Another secret and a rank that does not exist: neither takes a place."""
    save_tiny("llama", tmp_path)
    config = make_config(tmp_path, 2)
    (tmp_path / "other").mkdir()
    KeyRing.write_new(tmp_path / "other" / "secret")
    leader = GroupLeader(config, lambda rank: None)
    changed = {name: getattr(config, name) for name in GroupConfig.__slots__}
    strangers = [
        spawn_rank(GroupConfig(**(changed | {"secret_path": tmp_path / "other" / "secret"})), 1, leader.port),
        spawn_rank(config, 5, leader.port),
    ]
    honest: list[subprocess.Popen[bytes]] = []
    try:
        starting = threading.Thread(target=leader.start, daemon=True)
        starting.start()
        assert [stranger.wait(30) != 0 for stranger in strangers] == [True, True]
        honest.append(spawn_rank(config, 1, leader.port))
        starting.join(60)
        assert not starting.is_alive()
        leader.close()
        assert honest[0].wait(20) == 0
    finally:
        leader.close()
        for process in (*strangers, *honest):
            process.kill()
            process.wait(10)


def chunk(tokens: tuple[int, ...], first: int = 0, sampling: SamplingParams | None = None) -> Chunk:
    return Chunk(StreamKey(bytes(16), 0), tokens, first, ((3, 0, 7), (NULL_BLOCK, 5)), sampling, 4, True, True)


def test_a_plan_keeps_what_ranks_need() -> None:
    plan = StepPlan((chunk((5, 210), 6), chunk((9,), 2, SamplingParams(temperature=0.5, seed=7))))
    payload = encode_plan(plan)
    message = tp_group._CODEC.decode(payload)
    assert isinstance(message, tp_group.Plan)
    found = decode_plan(message)
    for ours, theirs in zip(found.chunks, plan.chunks, strict=True):
        assert (ours.tokens, ours.first_position, ours.tables) == (theirs.tokens, theirs.first_position, theirs.tables)
        assert (ours.sampling is None) == (theirs.sampling is None)
    assert len({found_chunk.key for found_chunk in found.chunks}) == 2
    assert len(payload) < 100
