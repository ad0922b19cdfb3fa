"""KVSender and KVReceiver in two processes, over gloo and shared memory: whole transfers, aborts, deaths, stops,
restarts and strangers."""

import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.kv_transfer.conftest import LAYOUT, PeerProcess, facts_when_idle, join, wait_until

pytestmark = pytest.mark.integration
TOKENS = 1000
BIG = {"num_layers": 24, "num_kv_heads": 8, "head_dim": 128, "block_tokens": 32, "dtype": "fp32"}
"""196,608 bytes a token: 1,000 tokens are 190 MiB, long enough on the way to be interrupted."""

Start = Callable[..., PeerProcess]
OVER_BOTH = pytest.mark.parametrize("transport", ["gloo", "shm"])


def ship(sender: PeerProcess, receiver: PeerProcess, key: int, first_block: int = 0, seed: int = 0) -> None:
    """Starts one transfer into `receiver`'s blocks from `first_block` on; returns when everything is queued."""
    blocks = list(range(first_block * 2, first_block * 2 + TOKENS // 16 + 1))
    receiver.do("expect", key=key, source=sender.incarnation, blocks=receiver_blocks(first_block), tokens=TOKENS)
    plan = {"tokens": TOKENS, "chunk": 64, "unit_bytes": 50_000}
    sender.do("ship", key=key, peer=receiver.incarnation, blocks=blocks, seed=seed, **plan)


def receiver_blocks(first_block: int) -> list[int]:
    return list(reversed(range(first_block, first_block + TOKENS // 32 + 1)))


def check(receiver: PeerProcess, first_block: int = 0, seed: int = 0) -> bool:
    answer: bool = receiver.do("check", blocks=receiver_blocks(first_block), tokens=TOKENS, seed=seed)
    return answer


@OVER_BOTH
def test_many_units_arrive_whole_and_both_ends_forget_them(pair):
    sender, receiver = pair
    fds = (sender.num_fds(), receiver.num_fds())
    for round_number in range(5):
        ship(sender, receiver, key=round_number, seed=round_number)
        arrived = receiver.wait_event("Arrived", key=round_number)
        assert sender.wait_event("Adopted", key=round_number)["units"] == arrived["units"] > 20
        assert arrived["meta"] == "meta"
        assert check(receiver, seed=round_number)
    assert facts_when_idle(sender, 1)["open"] == [2]
    assert facts_when_idle(receiver, 1)["open"] == [1]
    assert (sender.num_fds(), receiver.num_fds()) == fds
    assert (sender.close(), receiver.close()) == (0, 0)


@OVER_BOTH
@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_of_two_transfers_on_one_lane_one_is_aborted_and_the_other_untouched(pair, by: str):
    sender, receiver = pair
    for key in range(0, 20, 2):
        ship(sender, receiver, key=key, first_block=0, seed=key)
        ship(sender, receiver, key=key + 1, first_block=64, seed=key + 1)
        if by == "sender":
            sender.do("abort", key=key)
        else:
            receiver.do("revoke", key=key)
        receiver.wait_event("Arrived", key=key + 1)
        sender.wait_event("Adopted", key=key + 1)
        assert check(receiver, first_block=64, seed=key + 1)
        receiver.do("revoke", key=key)
    assert facts_when_idle(sender, 1)["open"] == [2]
    assert facts_when_idle(receiver, 1)["open"] == [1]
    assert not sender.seen("PeerDown")


STUCK_S = 5
"""How long gloo may hold a waiter whose peer died in the middle of a message; 10 s outside of tests."""


def start_big(start: Start) -> tuple[PeerProcess, PeerProcess]:
    sender = start("sender", incarnation=1, layout=BIG, num_blocks=34, stuck_s=STUCK_S)
    receiver = start("receiver", incarnation=2, layout=BIG, num_blocks=34, stuck_s=STUCK_S)
    join(sender, receiver)
    return sender, receiver


def freeze_in_flight(sender: PeerProcess, receiver: PeerProcess, victim: PeerProcess, survivor: PeerProcess) -> int:
    """Stops `victim` while a 190 MiB unit is on its way; returns the key of that transfer."""
    blocks = list(range(32))
    for key in range(20):
        receiver.do("expect", key=key, source=1, blocks=blocks, tokens=TOKENS)
        sender.do("ship", key=key, peer=2, blocks=blocks, tokens=TOKENS, seed=key, chunk=TOKENS, unit_bytes=1 << 30)
        victim.signal(signal.SIGSTOP)
        if survivor.do("facts")["in_flight"] > 0:
            return key
        victim.signal(signal.SIGCONT)  # it was quicker than the signal
        receiver.wait_event("Arrived", key=key)
        sender.wait_event("Adopted", key=key)
    raise AssertionError("no transfer was caught in flight")


def reclaim(receiver: PeerProcess, key: int) -> None:
    """What a caller does when told that a transfer failed: all blocks come back, the quarantined ones on proof."""
    if receiver.do("revoke", key=key):
        receiver.wait_event("BlocksProven", timeout_s=2)


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_the_survivor_of_a_kill_in_mid_message_fails_it_at_once_and_leaks_nothing(start: Start, victim: str):
    sender, receiver = start_big(start)
    dead, survivor = (sender, receiver) if victim == "sender" else (receiver, sender)
    fds = survivor.num_fds()
    key = freeze_in_flight(sender, receiver, dead, survivor)
    started = time.monotonic()
    dead.kill()
    survivor.wait_event("TransferFailed", key=key, reason="peer_lost", timeout_s=2)
    assert time.monotonic() - started < 1
    survivor.wait_event("SourceDown" if victim == "sender" else "PeerDown", timeout_s=2)
    if victim == "sender":
        reclaim(receiver, key)
    assert facts_when_idle(survivor, 0)["open"] == []
    wait_until(lambda: survivor.num_fds() <= fds, 5, "descriptors of the lost peer are closed")


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_stopped_peer_is_detected_within_four_seconds_while_bytes_are_in_flight(start: Start, victim: str):
    sender, receiver = start_big(start)
    stopped, survivor = (sender, receiver) if victim == "sender" else (receiver, sender)
    key = freeze_in_flight(sender, receiver, stopped, survivor)
    started = time.monotonic()
    survivor.wait_event("TransferFailed", key=key, reason="peer_lost", timeout_s=6)
    assert 1.5 < time.monotonic() - started < 4.5
    stopped.signal(signal.SIGCONT)
    stopped.wait_event("TransferFailed", key=key, timeout_s=10)
    reclaim(receiver, key)
    join_again(sender, receiver)
    facts_when_idle(survivor, 1)
    facts_when_idle(stopped, 1)


def join_again(sender: PeerProcess, receiver: PeerProcess) -> None:
    receiver.wait_event("SourceDown", incarnation=1)
    receiver.wait_event("SourceUp", incarnation=1)
    sender.wait_event("PeerUp", incarnation=2)


@OVER_BOTH
def test_a_stopped_idle_peer_is_suspect_first_and_open_again_when_it_continues(pair):
    sender, receiver = pair
    sender.signal(signal.SIGSTOP)
    receiver.wait_event("SourceDown", incarnation=1, timeout_s=5)
    assert receiver.do("facts")["open"] == []
    sender.signal(signal.SIGCONT)
    receiver.wait_event("SourceUp", incarnation=1, timeout_s=3)
    ship(sender, receiver, key=1, seed=1)
    receiver.wait_event("Arrived", key=1)
    assert check(receiver, seed=1)


@OVER_BOTH
def test_a_restarted_sender_on_the_same_port_is_reached_under_its_new_incarnation_only(start: Start, pair):
    sender, receiver = pair
    port = sender.port
    sender.kill()
    receiver.wait_event("SourceDown", incarnation=1)
    again = start("sender", incarnation=3, port=port)
    receiver.do("sources", sources=[[1, port], [3, port]])
    receiver.wait_event("SourceUp", incarnation=3)
    assert receiver.do("facts")["open"] == [3]
    again.wait_event("PeerUp", incarnation=2)
    ship(again, receiver, key=1, seed=5)
    receiver.wait_event("Arrived", key=1)
    assert check(receiver, seed=5)
    receiver.do("expect", key=2, source=1, blocks=receiver_blocks(0), tokens=TOKENS)
    receiver.wait_event("TransferFailed", key=2, reason="peer_lost")


@OVER_BOTH
def test_a_restarted_receiver_is_served_again(start: Start, pair):
    sender, receiver = pair
    receiver.kill()
    sender.wait_event("PeerDown", incarnation=2)
    again = start("receiver", incarnation=4, layout={**LAYOUT, "block_tokens": 32}, num_blocks=128)
    join(sender, again)
    ship(sender, again, key=1, seed=5)
    again.wait_event("Arrived", key=1)
    assert check(again, seed=5)
    assert sender.do("facts")["open"] == [4]
    facts_when_idle(sender, 1)


@OVER_BOTH
def test_a_lane_outlives_leaving_the_list_of_sources(pair):
    sender, receiver = pair
    receiver.do("sources", sources=[])
    ship(sender, receiver, key=1, seed=2)
    receiver.wait_event("Arrived", key=1)
    assert check(receiver, seed=2)
    sender.kill()
    receiver.wait_event("SourceDown", incarnation=1)
    facts_when_idle(receiver, 0)


@OVER_BOTH
def test_a_begin_that_nobody_expects_fails_and_harms_nothing(pair):
    sender, receiver = pair
    arguments = {"blocks": list(range(4)), "tokens": 64, "seed": 1, "chunk": 64, "unit_bytes": 1 << 20}
    sender.do("ship", key=7, peer=2, **arguments)
    sender.wait_event("TransferFailed", key=7, reason="not_expected")
    sender.do("ship", key=8, peer=99, **arguments)
    sender.wait_event("TransferFailed", key=8, reason="peer_lost")
    ship(sender, receiver, key=1, seed=4)
    receiver.wait_event("Arrived", key=1)
    assert check(receiver, seed=4)
    facts_when_idle(sender, 1)
