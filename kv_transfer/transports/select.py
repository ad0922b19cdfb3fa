"""Names of transports to transports; each is imported only when chosen."""

from typing import Literal, assert_never, get_args

from kv_transfer.transports.base import Transport

TransportName = Literal["gloo", "loopback"]


def make_transport(name: TransportName, host: str) -> Transport:
    """The named transport, its listeners bound to `host`. Raises ValueError for an unknown name."""
    if name not in get_args(TransportName):
        raise ValueError(f"unknown transport {name!r}; known: {', '.join(get_args(TransportName))}")
    match name:
        case "gloo":
            from kv_transfer.transports.gloo import GlooTransport

            return GlooTransport(host)
        case "loopback":
            from kv_transfer.transports.loopback import LoopbackTransport

            return LoopbackTransport()
        case _:
            assert_never(name)
