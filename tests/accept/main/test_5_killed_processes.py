"""Line 5: kill -9 of a worker or of the ingress mid-request, on the real cluster under Ray."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.raw_client import RawStream
from tests.support.real_server import RealServer
from tests.support.serve_process import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
LONG = "Tell me a very long story about the sea. " * 60


def chat(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"model": "smollm2-135m", "stream": True, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "messages": [{"role": "user", "content": prompt}]}  # fmt: skip


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_a_killed_worker_costs_at_most_its_requests(real_server: RealServer, pool: str) -> None:
    """The client gets the whole answer or an error event, in time and never a clean end in the middle."""
    killed = real_server.worker(pool)
    stream = RawStream(real_server.port, "/v1/chat/completions", chat(LONG, 40))
    events = stream.events()
    if pool == "prefill":
        wait_for("the prompt is being computed", lambda: real_server.worker(pool)["queued_tokens"] > 0)
    else:
        next(events)
    os.kill(killed["pid"], signal.SIGKILL)
    rest = list(events)
    stream.hang_up()
    assert rest[-1] == "[DONE]" or '"error"' in rest[-1], rest[-2:]
    if rest[-1] == "[DONE]":
        assert any('"finish_reason":"length"' in event for event in rest)
    real_server.wait_replaced(pool, killed["pid"])
    answer = httpx.post(real_server.url + "/v1/chat/completions", json={**chat("Hi", 3), "stream": False}, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    real_server.wait_idle()


def test_a_killed_ingress_leaves_decode_idle_within_3_s(real_server: RealServer) -> None:
    streams = [
        RawStream(real_server.port, "/v1/chat/completions", chat("Count to a million.", 2000)) for _ in range(20)
    ]
    for stream in streams:
        next(stream.events())
    wait_for("all twenty decode", lambda: real_server.worker("decode")["running"] == 20)
    decode = real_server.worker("decode")
    with ThreadPoolExecutor(1) as pool:
        idle_at = pool.submit(real_server.wait_worker_idle, decode["pid"], 30.0)
        wait_for("the observer is connected", real_server.is_observed.is_set)
        os.kill(real_server.ingress_pid(), signal.SIGKILL)
        killed_at = time.monotonic()
        took_s = idle_at.result() - killed_at
    ended = [threading.Thread(target=_read_to_end, args=(stream,)) for stream in streams]
    for thread in ended:
        thread.start()
    assert took_s <= 3.0, f"decode worked on for {took_s:.1f} s"
    for thread in ended:
        thread.join(30)
    real_server.wait_healthy()
    assert real_server.worker("decode")["pid"] == decode["pid"]
    real_server.wait_idle()
    assert real_server.worker("decode")["blocks_in_use"] == 0


def _read_to_end(stream: RawStream) -> None:
    try:
        stream.read_all()
    except ConnectionError:
        pass
    stream.hang_up()
