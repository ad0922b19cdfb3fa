"""Line 8: every listener of the whole process tree, Ray's included, is on loopback; and an ending with open streams.

Every other ending (each phase, twice, SIGTERM, a closed terminal, kill -9 and sweep, a taken port) is in tests/ray.
"""

import ipaddress
import socket

import psutil
import pytest

from tests.support.raw_client import RawStream
from tests.support.real_server import RealServer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_every_listener_is_on_loopback(real_server: RealServer) -> None:
    listeners = [
        (process.pid, process.name(), connection.laddr.ip, connection.laddr.port)
        for process in real_server.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr)
    ]
    assert len(listeners) >= 5, "the test looked at the wrong processes"
    assert real_server.port in {port for _, _, _, port in listeners}
    strangers = [entry for entry in listeners if not is_loopback(entry[2])]
    assert strangers == []


def test_open_streams_end_with_an_error_event_and_nothing_is_left() -> None:
    server = RealServer()
    try:
        folder = server.wait_ready().run_folder()
        body = {
            "model": "smollm2-135m",
            "stream": True,
            "max_tokens": 4000,
            "ignore_eos": True,
            "prompt": "Once upon a time",
        }
        stream = RawStream(server.port, "/v1/completions", body)
        events = stream.events()
        for _ in range(3):
            next(events)
        server.interrupt()
        rest = list(events)
        assert "shutting_down" in rest[-1]
        stream.hang_up()
        server.assert_ends_without_a_trace(folder)
    finally:
        server.end()


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.split("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback
