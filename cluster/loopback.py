"""Moves the one listener that Ray hard-codes to all interfaces back to loopback.

Each Serve replica starts a gRPC server on `[::]:0` (ray/serve/_private/replica.py of Ray 2.60). The replica module
holds the function that binds it as a global name; replacing that name in the replica's own process moves the listener.
The contract test tests/contract/test_ray_loopback.py fails when a new Ray names or calls it differently.
"""

from typing import Any

_EVERYWHERE = "[::]:"
_LOOPBACK = "127.0.0.1:"


def move_replica_listener() -> None:
    """The gRPC server of this replica process will listen on 127.0.0.1. Call in a replica's constructor. Idempotent."""
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    if getattr(bind, "is_on_loopback", False):
        return

    def bind_on_loopback(server: Any, address: str) -> int:
        port: int = bind(server, loopback_address(address))
        return port

    bind_on_loopback.is_on_loopback = True  # type: ignore[attr-defined]  # functions take attributes
    replica.add_port_to_grpc_server = bind_on_loopback


def loopback_address(address: str) -> str:
    """`[::]:PORT` as `127.0.0.1:PORT`; every other address unchanged."""
    return _LOOPBACK + address.removeprefix(_EVERYWHERE) if address.startswith(_EVERYWHERE) else address
