"""Is a port free, and does it stay ours: a taken port is an error before anything starts.

Serve's proxy sets SO_REUSEPORT, so a second server on one port would silently run beside the first. A listener is found
by connecting; a bound socket by a trial bind with SO_REUSEPORT (a plain bind fails for a minute after a stop, without
reason); a start that has not bound yet by the lock it holds.
"""

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO


class PortTaken(Exception):
    """Somebody else holds the port; the text says who where that is known, and what to do."""


class PortClaim:
    """A port of this machine, claimed against other starts of Baton until `release` or the end of the process."""

    def __init__(self, port: int, lock: TextIO) -> None:
        self.port, self._lock = port, lock

    def release(self) -> None:
        self._lock.close()


def claim_port(host: str, port: int, locks_dir: Path) -> PortClaim:
    """The port is free, and another start of this user is told that it is taken. Raises `PortTaken`."""
    locks_dir.mkdir(parents=True, exist_ok=True)
    lock = (locks_dir / f"port-{port}.lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        who = f"another baton serve (pid {holder})" if holder else "another baton serve"
        raise PortTaken(_tell(port, who)) from None
    if is_taken(host, port):
        lock.close()
        raise PortTaken(_tell(port, "another program"))
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return PortClaim(port, lock)


def _tell(port: int, who: str) -> str:
    other = port + 1 if port < 65535 else 8000
    return f"port {port} is taken by {who}; stop it, or choose another port: make serve PORT={other}"


def is_taken(host: str, port: int) -> bool:
    """Whether a listener answers on the port or a socket is bound to it."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((host, port)) == 0:
            return True
    with socket.socket() as trial:
        if hasattr(socket, "SO_REUSEPORT"):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return True
            raise
    return False
