"""Which of the transports that two workers have moves the bytes between them, and whether digests go with them. Pure.

Both ends take the same decision from the two identities that the handshake proved.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Verify = Literal["auto", "off", "full"]
PREFERENCE = ("loopback", "shm", "gloo")
ONE_HOST = "shm"
"""Reaches a process of the same host only."""

ONE_SIDED = frozenset({"shm"})
"""The sender writes by itself, so a grant needs an open lane."""


class Offer(NamedTuple):
    """What one worker has."""

    transports: Sequence[str]
    host_id: str
    """Equal where two workers can share memory; "" is equal to nothing."""


class Choice(NamedTuple):
    transport: str
    reason: str


def choose_transport(ours: Offer, theirs: Offer) -> Choice | None:
    """The first of PREFERENCE that both have and that reaches from one to the other; None where none does."""
    is_one_host = ours.host_id == theirs.host_id != ""
    passed: list[str] = []
    for name in PREFERENCE:
        offers = (name in ours.transports, name in theirs.transports)
        if all(offers) and (is_one_host or name != ONE_HOST):
            return Choice(name, "both on one host" if name == ONE_HOST else "; ".join(passed) or "the only one offered")
        if any(offers):
            passed.append(f"{name} does not reach another host" if all(offers) else f"only one end offers {name}")
    return None


def has_digests(verify: Verify, transport: str) -> bool:
    """Whether FIN carries a digest per unit. "auto": where bytes leave the memory of the two processes."""
    return verify == "full" or (verify == "auto" and transport != ONE_HOST)
