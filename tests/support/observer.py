"""Watches one worker over its front link, as an ingress that asks for nothing: the worker's own word, whoever else has
died.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable

import psutil

from kv_transfer.errors import TransferError
from kv_transfer.wire import Connection, KeyRing, client_steps, dial
from workers.protocol import FRONT_CODEC, FRONT_PLANE, IDENTITY_CODEC, IngressIdentity, Load, Resume


def watch_load(
    ring: KeyRing, pid: int, is_enough: Callable[[Load], bool], timeout_s: float, is_connected: threading.Event
) -> float:
    """The monotonic time at which the worker `pid` first sent a LOAD that is enough. Raises TimeoutError."""
    return asyncio.run(_watch(ring, pid, is_enough, timeout_s, is_connected))


async def _watch(
    ring: KeyRing, pid: int, is_enough: Callable[[Load], bool], timeout_s: float, is_connected: threading.Event
) -> float:
    async with asyncio.timeout(timeout_s):
        connection = await _find_front_link(ring, pid)
        is_connected.set()
        try:
            connection.send(FRONT_CODEC.encode(Resume((), complete=True)))
            while True:
                message = FRONT_CODEC.decode(await connection.receive())
                if isinstance(message, Load) and is_enough(message):
                    return time.monotonic()
        finally:
            connection.abort()


async def _find_front_link(ring: KeyRing, pid: int) -> Connection:
    """Of the worker's listeners, the one that answers the front link's handshake."""
    body = IDENTITY_CODEC.encode(IngressIdentity(secrets.randbits(63), 0))
    listeners = [c.laddr for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    for host, port in listeners:
        steps = client_steps(ring, FRONT_PLANE, body, lambda _: None)
        try:
            return await dial(host, port, steps, FRONT_CODEC.max_frame_bytes)
        except TransferError:
            continue
    raise AssertionError(f"process {pid} answers no front link on {listeners}")
