"""What a link remembers of its worker's prefix cache."""

import pytest

from kv_transfer.errors import FrameInvalid
from kv_transfer.wire import KeyRing
from router.link import LinkFacts, WorkerLink
from workers.protocol import FRONT_CODEC, NAME_BYTES, Cache, WorkerEndpoint

A, B, C = (letter * NAME_BYTES for letter in (b"a", b"b", b"c"))


def make_link() -> WorkerLink:
    facts = LinkFacts(KeyRing((("k1", b"s" * 32),)), "m", 1, 2.0, lambda: 0.0)
    return WorkerLink(WorkerEndpoint("prefill", 7, "127.0.0.1", 1, 0), facts, owner=None)  # type: ignore[arg-type]


def hear(link: WorkerLink, *, is_whole: bool = False, added: bytes = b"", removed: bytes = b"") -> None:
    message = FRONT_CODEC.decode(FRONT_CODEC.encode(Cache(is_whole, added, removed)))
    assert isinstance(message, Cache)
    link._note(message)


def test_changes_add_up_and_a_whole_answer_replaces_them() -> None:
    link = make_link()
    hear(link, added=A + B)
    assert link.snapshot().cached == {A, B}
    hear(link, added=C, removed=A)
    assert link.snapshot().cached == {B, C}
    hear(link, is_whole=True, added=A)
    assert link.snapshot().cached == {A}


def test_a_name_that_is_cut_short_is_no_frame() -> None:
    link = make_link()
    with pytest.raises(FrameInvalid, match="multiple of 16"):
        hear(link, added=A + b"x")
    assert link.snapshot().cached == set()
