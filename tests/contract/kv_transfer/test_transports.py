"""What every transport promises to a lane, over loopback and gloo; the peer is another thread here, another process in
tests/integration."""

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import psutil
import pytest
import torch

from kv_transfer.errors import DeadlineExceeded, PeerLost, TransferError
from kv_transfer.lane import WARM_UP_BYTES, WINDOW, BlobExchange, Lane, LaneWork, is_warm_up, make_warm_up
from kv_transfer.transports import base, gloo, loopback
from kv_transfer.transports.base import DataPair, Ticket, Transport
from kv_transfer.transports.select import make_transport

Pair = tuple[DataPair, DataPair]
RECEIVER, SENDER = 0, 1


@pytest.fixture(params=["loopback", "gloo"])
def transport(request: pytest.FixtureRequest) -> Transport:
    name: Literal["loopback", "gloo"] = request.param
    return make_transport(name, "127.0.0.1")


def open_both(transport: Transport, lane: bytes = b"lane-one") -> Pair:
    """(receiving end, sending end) of a new pair."""
    return open_ends(transport, transport, lane)


def open_ends(receiving: Transport, sending: Transport, lane: bytes = b"lane-one") -> Pair:
    ends: list[BlobExchange] = []
    ends.append(BlobExchange(lambda blob: ends[1].feed(blob)))
    ends.append(BlobExchange(lambda blob: ends[0].feed(blob)))
    with ThreadPoolExecutor(2) as pool:
        opening = [
            pool.submit(transport.open, rank, lane, ends[rank])
            for rank, transport in ((RECEIVER, receiving), (SENDER, sending))
        ]
        return opening[RECEIVER].result(), opening[SENDER].result()


@pytest.fixture
def pair(transport: Transport):
    receiver, sender = open_both(transport)
    yield receiver, sender
    receiver.poison()
    sender.poison()


def payload(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("num_bytes", [1, 4096, 3 << 20])
def test_a_send_fills_the_receive_posted_for_it(pair: Pair, num_bytes: int):
    receiver, sender = pair
    sent = payload(num_bytes)
    ticket, into = sender.send(sent), receiver.receive(empty(num_bytes))
    into.wait()
    ticket.wait()
    assert torch.equal(into.buffer, sent)


def test_the_nth_send_fills_the_nth_receive_whatever_the_sizes(pair: Pair):
    receiver, sender = pair
    sizes = [64, 1 << 20, 7, 64, 64, 3 << 20, 1]
    for start in range(0, len(sizes), WINDOW):
        window = sizes[start : start + WINDOW]
        sends = [sender.send(payload(size, start + n)) for n, size in enumerate(window)]
        receives = [receiver.receive(empty(size)) for size in window]
        for n, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            receive.wait()
            send.wait()
            assert torch.equal(receive.buffer, payload(window[n], start + n))


def test_a_send_waits_for_its_receive(pair: Pair):
    receiver, sender = pair
    sent = threading.Event()
    ticket = sender.send(payload(8 << 20))
    thread = threading.Thread(target=lambda: (ticket.wait(), sent.set()))
    thread.start()
    assert not sent.wait(0.1), "large sends are no mailbox: no receive is posted yet"
    receiver.receive(empty(8 << 20)).wait()
    assert sent.wait(5)
    thread.join(5)


@pytest.mark.parametrize("who", [RECEIVER, SENDER])
def test_poison_by_either_end_fails_what_waits_on_both(pair: Pair, who: int):
    receiver = pair[RECEIVER]
    failures: list[str] = []

    def wait(name: str, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except PeerLost:
            failures.append(name)

    waiting = [
        threading.Thread(target=wait, args=("receive", receiver.receive(empty(64)))),
        threading.Thread(target=wait, args=("receive", receiver.receive(empty(64)))),
    ]
    for thread in waiting:
        thread.start()
    started = time.monotonic()
    pair[who].poison()
    pair[who].poison()
    for thread in waiting:
        thread.join(5)
    assert failures == ["receive", "receive"]
    assert time.monotonic() - started < 2
    with pytest.raises(PeerLost):
        pair[who].receive(empty(64)).wait()


def test_pairs_are_independent(transport: Transport):
    first, second = open_both(transport, b"lane-one"), open_both(transport, b"lane-two")
    first[SENDER].poison()
    ticket, into = second[SENDER].send(payload(100)), second[RECEIVER].receive(empty(100))
    into.wait()
    ticket.wait()
    assert torch.equal(into.buffer, payload(100))
    for end in (*first, *second):
        end.poison()


def test_opening_without_a_peer_ends_at_the_deadline(transport: Transport, monkeypatch):
    for module in (base, gloo, loopback):
        monkeypatch.setattr(module, "OPEN_TIMEOUT_S", 0.2)
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, PeerLost)):
        transport.open(RECEIVER, b"lane-one", BlobExchange(lambda blob: None))
    assert time.monotonic() - started < 3


def test_opening_ends_when_the_lane_connection_does(transport: Transport, monkeypatch):
    for module in (base, gloo, loopback):
        monkeypatch.setattr(module, "OPEN_TIMEOUT_S", 1.0)
    exchange = BlobExchange(lambda blob: None)
    exchange.fail()
    with pytest.raises(TransferError):
        transport.open(RECEIVER, b"lane-one", exchange)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="gloo, loopback"):
        make_transport("carrier-pigeon", "127.0.0.1")  # type: ignore[arg-type]


# --- lanes over each transport --------------------------------------------------------------------------------------


class Ends:
    """A sending and a receiving lane, joined as sessions join them: a posted send hands its size to the receiver."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.exchanges: list[BlobExchange] = []
        self.exchanges.append(BlobExchange(lambda blob: self.exchanges[1].feed(blob)))
        self.exchanges.append(BlobExchange(lambda blob: self.exchanges[0].feed(blob)))
        self.ready = [threading.Event(), threading.Event()]
        self.ended = [threading.Event(), threading.Event()]
        self.received: list[torch.Tensor] = []
        self.hold = threading.Event()
        self.hold.set()
        self.most_in_flight = 0
        self.sender: Lane[torch.Tensor] = self.make(SENDER, self.post_send, self.complete_send)
        self.receiver: Lane[int] = self.make(RECEIVER, lambda p, n: p.receive(empty(n)), self.complete_receive)
        self.sender.start()
        self.receiver.start()

    def make(self, rank: int, post: Callable[..., Ticket], complete: Callable[..., None]) -> Lane:
        def ended(reason: str) -> None:
            self.ended[rank].set()

        work = LaneWork(
            lambda: self.transport.open(rank, b"lane-ends", self.exchanges[rank]),
            post,
            complete,
            self.ready[rank].set,
            ended,
        )
        return Lane(str(rank), work)

    def post_send(self, pair: DataPair, item: torch.Tensor) -> Ticket:
        self.receiver.offer(item.numel())
        return pair.send(item)

    def complete_send(self, item: torch.Tensor, ticket: Ticket) -> None:
        self.most_in_flight = max(self.most_in_flight, self.sender.num_in_flight)
        ticket.wait()

    def complete_receive(self, num_bytes: int, ticket: Ticket) -> None:
        ticket.wait()
        self.hold.wait(10)
        self.received.append(ticket.buffer)

    def close(self) -> None:
        self.hold.set()
        self.sender.close("test")
        self.receiver.close("test")
        assert all(event.wait(15) for event in self.ended)


@pytest.fixture
def ends(transport: Transport):
    made = Ends(transport)
    assert all(event.wait(5) for event in made.ready)
    yield made
    made.close()


def poll(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.002)


def test_a_lane_keeps_order_and_window(ends: Ends):
    items = [payload(1000 + n, n) for n in range(50)]
    for item in items:
        ends.sender.offer(item)
    poll(lambda: len(ends.received) == len(items))
    assert all(torch.equal(got, sent) for got, sent in zip(ends.received, items, strict=True))
    assert 1 <= ends.most_in_flight <= WINDOW
    poll(lambda: ends.sender.num_in_flight == ends.receiver.num_in_flight == 0)


def test_items_not_yet_posted_can_be_dropped(ends: Ends):
    ends.hold.clear()
    items = [payload(2 << 20, n) for n in range(20)]
    for item in items:
        ends.sender.offer(item)
    dropped = ends.sender.drop(lambda item: item is not items[0])
    ends.hold.set()
    assert dropped >= len(items) - 2 * WINDOW - 1
    poll(lambda: len(ends.received) == len(items) - dropped)
    assert ends.sender.num_waiting == 0


def test_closing_one_end_ends_both_and_swallows_later_offers(ends: Ends):
    ends.receiver.close("test")
    assert ends.ended[RECEIVER].wait(5)
    ends.sender.offer(payload(64))
    ends.receiver.offer(64)
    assert ends.ended[SENDER].wait(5)
    ends.sender.offer(payload(64))
    assert ends.sender.num_waiting == 0
    assert ends.received == []


def test_items_offered_before_the_pair_is_open_are_sent_once_it_is(transport: Transport):
    ends = Ends(transport)
    ends.sender.offer(payload(77))
    poll(lambda: len(ends.received) == 1)
    ends.close()


def test_a_stranger_who_holds_gloo_s_numbers_costs_one_lane_at_most(monkeypatch: pytest.MonkeyPatch):
    """gloo gives a pair to whoever names its number on the listener; the next pair opens on another listener."""
    monkeypatch.setattr(gloo, "OPEN_TIMEOUT_S", 2.0)
    before = own_ports()
    ends = [make_transport("gloo", "127.0.0.1") for _ in range(2)]
    strangers = []
    for port in own_ports() - before:
        for number in range(16):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=3)
            stranger.sendall(struct.pack("<q", number))
            strangers.append(stranger)
    opened = 0
    for _ in range(3):
        try:
            receiver, sender = open_ends(ends[0], ends[1])
            into, ticket = receiver.receive(empty(64)), sender.send(payload(64))
            into.wait()
            ticket.wait()
            opened += torch.equal(into.buffer, payload(64))
            receiver.poison()
            sender.poison()
        except TransferError:
            for end in ends:
                end.renew()
    for stranger in strangers:
        stranger.close()
    assert opened >= 1, "the stranger shut the lane for good"


def own_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_warm_up_is_known_to_the_lane_s_two_ends_only():
    assert is_warm_up(b"lane-one", make_warm_up(b"lane-one"))
    assert not is_warm_up(b"lane-two", make_warm_up(b"lane-one"))
    assert not is_warm_up(b"lane-one", torch.zeros(WARM_UP_BYTES, dtype=torch.uint8))
