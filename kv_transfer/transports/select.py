"""Names of transports to transports; each is imported only when chosen."""

from collections.abc import Mapping
from typing import Literal, assert_never, get_args

from kv_transfer.pool import SharedPool
from kv_transfer.transports.base import Transport

TransportName = Literal["shm", "gloo", "loopback"]
Wish = Literal["auto", "shm", "gloo", "loopback"]


def make_transport(name: TransportName, host: str, pool: SharedPool | None = None) -> Transport:
    """The named transport, its listeners bound to `host`; shm lets writers into `pool`.

    Raises ValueError for an unknown name, `FenceUnavailable` for shm without its library.
    """
    if name not in get_args(TransportName):
        raise ValueError(f"unknown transport {name!r}; known: {', '.join(get_args(TransportName))}")
    match name:
        case "shm":
            from kv_transfer.transports.shm import ShmTransport

            return ShmTransport(pool)
        case "gloo":
            from kv_transfer.transports.gloo import GlooTransport

            return GlooTransport(host)
        case "loopback":
            from kv_transfer.transports.loopback import LoopbackTransport

            return LoopbackTransport()
        case _:
            assert_never(name)


def find_shm_fault() -> str:
    """Why this process cannot move KV through shared memory; empty where it can."""
    from kv_transfer.transports.shm import find_fault

    return find_fault()


def find_host_id() -> str:
    """Equal for two processes that can share memory; "" where nothing tells."""
    from kv_transfer.transports.shm import find_host_id

    return find_host_id()


def make_transports(
    wish: Wish, host: str, shm_fault: str = "", pool: SharedPool | None = None
) -> Mapping[str, Transport]:
    """What this worker offers in the handshake: the wish alone, or with "auto" gloo and, without `shm_fault`, shm.

    Raises ValueError when shm is wished for and cannot be.
    """
    if wish == "shm" and shm_fault:
        raise ValueError(f"transfer.transport is shm, but {shm_fault}")
    names: tuple[TransportName, ...] = (wish,) if wish != "auto" else ("gloo",) if shm_fault else ("shm", "gloo")
    return {name: make_transport(name, host, pool) for name in names}
