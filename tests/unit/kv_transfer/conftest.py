from collections.abc import Callable

import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.messages import KVIdentity
from kv_transfer.wire import KeyRing


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing((("k1", b"1" * 32),))


@pytest.fixture
def make_identity() -> Callable[..., KVIdentity]:
    def make(incarnation: int, digest: str = "d", layout: KVLayout | None = None, **fields: object) -> KVIdentity:
        return KVIdentity(incarnation, digest, layout or KVLayout(2, 2, 8, 4, "fp32"), **fields)  # type: ignore[arg-type]

    return make
