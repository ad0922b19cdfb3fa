"""A running cluster with fakes inside: membership, replacement, listeners, a second start."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.serve_process import ServeProcess, free_port, wait_for

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def served():
    process = ServeProcess(free_port())
    try:
        yield process.wait_ready()
    finally:
        process.end()


def workers(served) -> dict[str, dict]:
    return {worker["role"]: worker for worker in served.get("/workers") if "pid" in worker}


def is_complete(served) -> dict[str, dict]:
    """Both workers reached by the ingress, decode informed of prefill; empty until then."""
    found = workers(served)
    if found.keys() != {"prefill", "decode"}:
        return {}
    return found if found["decode"]["sources"] == [found["prefill"]["incarnation"]] else {}


def test_ingress_and_decode_hear_of_the_workers_without_any_request(served):
    found = wait_for("the membership", lambda: is_complete(served))
    assert len({worker["pid"] for worker in found.values()}) == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_is_replaced_and_everybody_hears(served, role):
    before = wait_for("the membership", lambda: is_complete(served))
    os.kill(before[role]["pid"], signal.SIGKILL)

    def is_replaced() -> bool:
        now = is_complete(served)
        return bool(now) and now[role]["incarnation"] != before[role]["incarnation"]

    wait_for("a new worker in both views", is_replaced, 60)
    other = "decode" if role == "prefill" else "prefill"
    assert workers(served)[other]["pid"] == before[other]["pid"]


def test_a_killed_ingress_comes_back_and_knows_the_workers(served):
    before = wait_for("the membership", lambda: is_complete(served))
    (ingress,) = [p for p in served.processes() if "ingress" in " ".join(p.cmdline())]
    ingress.kill()

    def is_back() -> bool:
        try:
            return bool(is_complete(served))
        except (ValueError, OSError):
            return False

    wait_for("the ingress", lambda: not ingress.is_running() and is_back(), 60)
    assert is_complete(served)["prefill"]["pid"] == before["prefill"]["pid"]


def test_every_listener_of_the_process_tree_is_on_loopback(served):
    wait_for("the membership", lambda: is_complete(served))
    tree = [psutil.Process(served.process.pid), *served.processes()]
    listeners = [
        (process.name(), connection.laddr.ip)
        for process in tree
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(tree) >= 8
    assert len(listeners) >= 8
    assert [entry for entry in listeners if entry[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == []


def test_a_second_start_on_the_port_is_a_plain_error(served):
    second = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", "--port", str(served.port)], capture_output=True, text=True
    )
    assert second.returncode == 1
    assert second.stderr.startswith(
        f"baton: error: port {served.port} is taken by another baton serve (pid {served.process.pid})"
    )
    assert second.stdout == ""
    assert is_complete(served)


def test_the_secret_is_in_no_argument_and_no_environment(served):
    secret = served.run_folder().secret_path.read_text().strip().split(":")[1]
    for process in served.processes():
        assert secret not in " ".join(process.cmdline())
        assert secret not in " ".join(process.environ().values())


def test_a_pool_grows_and_shrinks_by_hand_and_everybody_hears(served):
    before = wait_for("the membership", lambda: is_complete(served))

    def sources() -> list[list[int]]:
        return [worker["sources"] for worker in served.get("/workers") if worker["role"] == "decode"]

    served.get("/scale/prefill/3")
    wait_for("decode hears of three", lambda: [len(known) for known in sources()] == [3], 60)
    assert workers(served)["decode"]["pid"] == before["decode"]["pid"]
    served.get("/scale/prefill/1")
    wait_for("decode hears of one", lambda: [len(known) for known in sources()] == [1], 60)
    wait_for("two are gone", lambda: [w["role"] for w in served.get("/workers")].count("prefill") == 1)
