"""A taken port is seen whoever holds it: a listener, a bound socket, another start that has not bound yet."""

import socket
import subprocess
import sys

import pytest

from cluster.ports import PortTaken, claim_port, is_taken

HOST = "127.0.0.1"
HOLDER = """
import sys
from pathlib import Path
from cluster.ports import claim_port
claim = claim_port(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""


def bound(listen: bool, reuse: bool = False) -> socket.socket:
    holder = socket.socket()
    if reuse:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind((HOST, 0))
    if listen:
        holder.listen()
    return holder


@pytest.mark.parametrize(("listen", "reuse"), [(True, False), (True, True), (False, False)])
def test_a_held_port_is_taken_and_free_afterwards(listen, reuse):
    with bound(listen, reuse) as holder:
        port = holder.getsockname()[1]
        assert is_taken(HOST, port)
    assert not is_taken(HOST, port)


def test_a_port_is_free_right_after_a_stop_with_connections_in_time_wait():
    with bound(listen=True, reuse=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError):
        plain.bind((HOST, port))
    assert not is_taken(HOST, port)


def test_a_start_that_has_not_bound_yet_is_seen(tmp_path):
    with bound(listen=False) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", HOLDER, HOST, str(port), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PortTaken, match=rf"port {port} is taken by another baton serve \(pid {other.pid}\)"):
            claim_port(HOST, port, tmp_path)
        other.stdin.close()
    claim_port(HOST, port, tmp_path).release()


def test_the_error_names_another_port(tmp_path):
    with bound(listen=True) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken, match=r"another program; stop it, or choose another port: make serve PORT="):
            claim_port(HOST, port, tmp_path)
    claim_port(HOST, port, tmp_path).release()
