"""Which transport two workers take, and why."""

import pytest

from kv_transfer.choice import Choice, Offer, choose_transport, has_digests
from kv_transfer.layout import KVLayout
from kv_transfer.messages import KVIdentity

BOTH, ONLY_GLOO = ("shm", "gloo"), ("gloo",)


@pytest.mark.parametrize(
    ("ours", "theirs", "choice"),
    [
        (Offer(BOTH, "a"), Offer(BOTH, "a"), Choice("shm", "both on one host")),
        (Offer(BOTH, "a"), Offer(BOTH, "b"), Choice("gloo", "shm does not reach another host")),
        (Offer(BOTH, ""), Offer(BOTH, ""), Choice("gloo", "shm does not reach another host")),
        (Offer(BOTH, "a"), Offer(ONLY_GLOO, "a"), Choice("gloo", "only one end offers shm")),
        (Offer(ONLY_GLOO, "a"), Offer(ONLY_GLOO, "a"), Choice("gloo", "the only one offered")),
        (Offer(("gloo", "shm"), "a"), Offer(BOTH, "a"), Choice("shm", "both on one host")),
        (Offer(("loopback",), ""), Offer(("loopback",), ""), Choice("loopback", "the only one offered")),
        (Offer(("shm",), "a"), Offer(("shm",), "b"), None),
        (Offer(("shm",), "a"), Offer(ONLY_GLOO, "a"), None),
        (Offer(("nccl",), "a"), Offer(("nccl",), "a"), None),
    ],
)
def test_both_ends_choose_the_same_for_the_same_reason(ours: Offer, theirs: Offer, choice: Choice | None):
    assert choose_transport(ours, theirs) == choice
    assert choose_transport(theirs, ours) == choice


def test_who_has_no_way_in_common_is_refused():
    layout = KVLayout(1, 1, 8, 16, "fp32")
    here = KVIdentity(1, "d", layout, host_id="a", transports=("shm",))
    there = KVIdentity(2, "d", layout, host_id="b", transports=("shm",))
    assert here.refusal_of(there) == "transports shm against shm"
    assert here.refusal_of(KVIdentity(2, "d", layout, host_id="a", transports=("shm",))) is None


@pytest.mark.parametrize(
    ("verify", "transport", "wanted"),
    [("auto", "shm", False), ("auto", "gloo", True), ("full", "shm", True), ("off", "gloo", False)],
)
def test_digests_go_along_where_bytes_leave_the_two_processes(verify, transport, wanted):
    assert has_digests(verify, transport) is wanted
