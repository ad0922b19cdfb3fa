"""Run folders: private, owned, and swept with their processes once the owner is dead."""

import dataclasses
import json
import os
import subprocess
import sys

import psutil
import pytest

from cluster import runtime
from cluster.env import RUN_VARIABLE
from kv_transfer.wire import KeyRing
from tests.support.serve_process import wait_for

SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def run(tmp_path):
    folder = runtime.name_run(tmp_path)
    folder.create(8123, "laptop")
    return folder


def abandon(folder: runtime.RunFolder, **changes) -> None:
    """The folder looks as its owner left it when it was killed."""
    owner = json.loads((folder.path / "owner.json").read_text())
    (folder.path / "owner.json").write_text(json.dumps({**owner, **changes}))


def start_leftover(folder: runtime.RunFolder) -> subprocess.Popen:
    """A process of the run whose environment can be read: right after its start the kernel may still show none."""
    process = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, env={**os.environ, RUN_VARIABLE: str(folder.path)})
    wait_for("the leftover shows its environment", lambda: runtime.processes_of(folder), 10.0)
    return process


def test_folder_and_secret_are_private(run):
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert run.secret_path.stat().st_mode & 0o777 == 0o600
    assert len(KeyRing.load(run.secret_path).keys) == 1


def test_rays_sockets_fit(run):
    longest = (
        runtime.name_run(runtime.temp_root()).ray_dir
        / "session_2026-11-30_22-04-08_123456_4194304/sockets/plasma_store"
    )
    assert len(str(longest)) <= 104


def test_a_living_run_is_left_alone(run, tmp_path):
    assert runtime.sweep(tmp_path) == runtime.Swept(0, 0)
    assert [owner.port for _, owner in runtime.find_runs(tmp_path)] == [8123]
    assert run.secret_path.exists()


@pytest.mark.parametrize("changes", [{"started_s": 1.0}, {"pid": 2**22 + 1}], ids=["pid was reused", "pid is gone"])
def test_a_dead_run_is_swept_with_its_processes(run, tmp_path, changes):
    abandon(run, **changes)
    with start_leftover(run) as leftover:
        assert runtime.sweep(tmp_path) == runtime.Swept(1, 1)
        assert not psutil.pid_exists(leftover.pid)
    assert not run.path.exists()


def test_a_start_that_has_not_said_who_it_is_is_left_alone_while_it_lives(run, tmp_path):
    (run.path / "owner.json").unlink()
    assert runtime.sweep(tmp_path).num_folders == 0
    run.path.rename(tmp_path / f"{runtime.PREFIX}{2**22 + 1}-abcdef")
    assert runtime.sweep(tmp_path).num_folders == 1


def test_folders_of_other_programs_are_left_alone(tmp_path):
    (tmp_path / "baton-notes").mkdir()
    (tmp_path / "baton-123-link").symlink_to(tmp_path / "baton-notes")
    assert runtime.sweep(tmp_path).num_folders == 0
    assert (tmp_path / "baton-notes").is_dir()


def test_only_processes_of_the_run_end(run, tmp_path):
    other = runtime.name_run(tmp_path)
    with start_leftover(run) as ours, start_leftover(other) as theirs:
        assert runtime.end_processes(run) == 1
        assert not psutil.pid_exists(ours.pid)
        assert theirs.poll() is None
        theirs.stdin.close()


def test_an_owner_is_this_very_process(run):
    (_, owner), *_ = runtime.find_runs(run.path.parent)
    assert owner.is_alive
    assert owner.pid == os.getpid()
    assert not dataclasses.replace(owner, started_s=psutil.Process().create_time() - 60).is_alive
