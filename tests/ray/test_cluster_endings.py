"""However a start ends, nothing of it is left within five seconds; after kill -9 the next start sweeps."""

import signal
import socket
import threading

import httpx
import pytest

from tests.support.serve_process import ServeProcess, free_port, marked_processes, read_events, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture
def start():
    started = []

    def make(**options) -> ServeProcess:
        started.append(ServeProcess(options.pop("port", None) or free_port(), **options))
        return started[-1]

    yield make
    for process in started:
        process.end()


class OpenStream:
    """A client that reads a stream to its end in a thread."""

    def __init__(self, url: str) -> None:
        self.events: list[object] = []
        self.begun, self.failure = threading.Event(), None
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("GET", url + "/stream", timeout=60, trust_env=False) as response:
                self.begun.set()
                self.events = read_events(response)
        except httpx.HTTPError as error:
            self.failure = error

    def finish(self) -> list[object]:
        self._thread.join(timeout=30)
        assert self.failure is None, self.failure
        return self.events


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A slice presses twice; the full run once, too. tests/accept/main/test_1 ends a ready cluster by one Ctrl-C."""
    is_full = metafunc.config.getoption("--full")
    for name, few, more in (("presses", [2], [1]), ("how", ["Ctrl-C twice", "SIGTERM"], ["Ctrl-C"])):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, few + more * is_full)


def test_a_ready_cluster_with_an_open_stream_ends(start, how):
    served = start().wait_ready()
    stream, folder = OpenStream(served.url), served.run_folder()
    assert stream.begun.wait(10)
    if how == "SIGTERM":
        served.process.send_signal(signal.SIGTERM)
    else:
        for _ in range(2 if how == "Ctrl-C twice" else 1):
            served.interrupt()
    served.assert_ends_without_a_trace(folder)
    events = stream.finish()
    assert events[0] == "tick"
    assert events[-1] == {"error": {"code": "shutdown"}}


def test_a_closed_terminal_ends_a_ready_cluster(start):
    served = start(terminal=True).wait_ready()
    stream, folder = OpenStream(served.url), served.run_folder()
    assert stream.begun.wait(10)
    served.hang_up()
    served.assert_ends_without_a_trace(folder)
    assert stream.finish()[-1] == {"error": {"code": "shutdown"}}


@pytest.mark.parametrize("phase", ["Ray starts", "workers start"])
def test_ctrl_c_while_it_comes_up(start, phase, presses):
    served = start()
    if phase == "Ray starts":
        wait_for("a process of Ray", served.processes)
    else:
        served.wait_output(". Ray")
    folder = served.run_folder()
    for _ in range(presses):
        served.interrupt()
    served.assert_ends_without_a_trace(folder)


def test_a_terminal_closed_while_ray_starts(start):
    served = start(terminal=True)
    wait_for("a process of Ray", served.processes)
    folder = served.run_folder()
    served.hang_up()
    served.process.wait(timeout=60)
    wait_for("no process left", lambda: not marked_processes(folder), 10)
    assert not folder.path.exists()


def test_ctrl_c_while_the_model_is_fetched(start, tmp_path):
    with socket.socket() as silent_index:
        silent_index.bind(("127.0.0.1", 0))
        silent_index.listen()
        environ = {
            "BATON_CACHE": str(tmp_path / "cache"),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": f"http://127.0.0.1:{silent_index.getsockname()[1]}/",
            "PIP_FIND_LINKS": "",
        }
        served = start(environ=environ)
        connection, _ = silent_index.accept()
        with connection:
            served.interrupt()
            served.assert_ends_without_a_trace(None)
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir()]
    assert all(name.endswith(".lock") for name in left), left


def test_after_kill_9_the_next_start_sweeps_and_takes_the_port(start):
    served = start().wait_ready()
    folder = served.run_folder()
    served.process.kill()
    served.process.wait()
    assert folder.path.exists()
    again = start(port=served.port).wait_ready()
    assert "removed what a killed run left" in again.output
    assert not folder.path.exists()
    assert not marked_processes(folder)
    assert again.get("/ready") == {}


def test_a_worker_that_cannot_start_is_told_with_its_reason(start):
    served = start(is_broken=True)
    wait_for("a process of Ray", served.processes)
    folder = served.run_folder()
    served.process.wait(timeout=120)
    served.wait_output("prefill did not start: ValueError: the model folder holds no weights")
    served.assert_ends_without_a_trace(folder, status=1)
