"""Line 1: `make serve`, as a new user types it. The first start in a fresh clone with an empty cache is part of the
full run.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serve_process import free_port, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[3]
FIRST_START_S, NEXT_START_S, END_S = 300.0, 40.0, 5.0


@contextlib.contextmanager
def make_serve(checkout: Path, log: Path, limit_s: float, **environ: str) -> Iterator[str]:
    """The URL of a started server; it must end within 5 s of Ctrl-C."""
    port = free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            ["make", "serve", f"PORT={port}"], cwd=checkout, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **environ}, start_new_session=True,
        )  # fmt: skip
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        wait_for(f"ready within {limit_s:.0f} s", lambda: "ready" in log.read_text() and is_healthy(url), limit_s)
        print(f"make serve in {checkout.name}: ready after {time.monotonic() - started:.0f} s, limit {limit_s:.0f} s")
        yield url
    finally:
        os.killpg(process.pid, signal.SIGINT)
        ended = time.monotonic()
        process.wait(30)
    assert time.monotonic() - ended < END_S


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def ask(url: str) -> str:
    body = '{"model":"smollm2-135m","stream":true,"messages":[{"role":"user","content":"Why is the sky blue?"}]}'
    done = subprocess.run(
        ["curl", "-sSN", f"{url}/v1/chat/completions", "-d", body],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return done.stdout


def check_answer(output: str) -> None:
    """The README's curl, with the model's default sampling: many events, blue light and a clean end."""
    events = [line for line in output.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 20
    assert '"finish_reason":"stop"' in events[-2] or '"finish_reason":"length"' in events[-2]


def test_a_start_of_this_checkout_takes_seconds(tmp_path: Path) -> None:
    with make_serve(ROOT, tmp_path / "log", NEXT_START_S) as url:
        check_answer(ask(url))
    output = (tmp_path / "log").read_text()
    assert f"{url}" in output or url.replace("127.0.0.1", "localhost") in output
    assert "curl" in output
    assert "openai" in output


def test_the_first_start_of_a_fresh_clone(tmp_path: Path, is_full: bool) -> None:
    if not is_full:
        pytest.skip("part of the full run: make accept-main")
    clone, cache = tmp_path / "clone", tmp_path / "cache"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    try:
        with make_serve(clone, tmp_path / "first.log", FIRST_START_S, BATON_CACHE=str(cache)) as url:
            check_answer(ask(url))
        with make_serve(clone, tmp_path / "next.log", NEXT_START_S, BATON_CACHE=str(cache)) as url:
            check_answer(ask(url))
    finally:
        shutil.rmtree(clone, ignore_errors=True)
