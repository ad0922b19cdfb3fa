"""Which of many prefill workers a decode worker opens lanes to. Pure."""

import hashlib
from collections.abc import Sequence

from kv_transfer.events import KVSource

PAIRS_MAX = 16
"""Lanes cost memory on both sides: a decode worker holds at most this many."""


def choose_sources(own: int, sources: Sequence[KVSource], limit: int = PAIRS_MAX) -> tuple[KVSource, ...]:
    """At most `limit` of `sources` for the decode worker of incarnation `own`, by rendezvous hash.

    Every decode worker ranks the sources in its own order, so the pairs spread evenly; one source that comes or goes
    changes one pair of a worker at most. (Thaler and Ravishankar, "A name-based mapping scheme for rendezvous", 1996.)
    """
    ranked = sorted(sources, key=lambda source: _weight(own, source.incarnation), reverse=True)
    return tuple(ranked[:limit])


def _weight(own: int, source: int) -> bytes:
    return hashlib.blake2b(own.to_bytes(8, "little") + source.to_bytes(8, "little"), digest_size=8).digest()
