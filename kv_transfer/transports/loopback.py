"""Bytes moved inside one process: the executable specification of a transport, and what tests use.

Both ends share a `LoopbackTransport`; a pair is found by its lane id. The second of a matching send and receive copies.
"""

import threading
from collections import deque

from torch import Tensor

from kv_transfer.errors import DeadlineExceeded, PeerLost
from kv_transfer.transports.base import OPEN_TIMEOUT_S, STUCK_TIMEOUT_S, Exchange


class _Channel:
    """What the two ends of one lane share; everything under `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sends: deque[LoopbackTicket] = deque()
        self.receives: deque[LoopbackTicket] = deque()
        self.is_broken = False

    def match(self) -> None:
        while self.sends and self.receives:
            send, receive = self.sends.popleft(), self.receives.popleft()
            assert send.buffer.numel() == receive.buffer.numel(), "the two ends disagree on the length of a unit"
            receive.buffer.copy_(send.buffer)
            send.is_done = receive.is_done = True
        self.changed.notify_all()


class LoopbackTicket:
    def __init__(self, channel: _Channel, buffer: Tensor) -> None:
        self._channel, self.buffer, self.is_done = channel, buffer, False

    def wait(self) -> None:
        channel = self._channel
        with channel.changed:
            channel.changed.wait_for(lambda: self.is_done or channel.is_broken, STUCK_TIMEOUT_S)
            if self.is_done:
                return
            channel.is_broken = True
            channel.changed.notify_all()
        raise PeerLost("loopback pair is broken")


class LoopbackPair:
    def __init__(self, channel: _Channel) -> None:
        self._channel = channel

    def _post(self, queue: "deque[LoopbackTicket]", buffer: Tensor) -> LoopbackTicket:
        with self._channel.changed:
            if self._channel.is_broken:
                raise PeerLost("loopback pair is broken")
            ticket = LoopbackTicket(self._channel, buffer)
            queue.append(ticket)
            self._channel.match()
            return ticket

    def send(self, buffer: Tensor) -> LoopbackTicket:
        return self._post(self._channel.sends, buffer)

    def receive(self, buffer: Tensor) -> LoopbackTicket:
        return self._post(self._channel.receives, buffer)

    def poison(self) -> None:
        with self._channel.changed:
            self._channel.is_broken = True
            self._channel.changed.notify_all()


class LoopbackTransport:
    name = "loopback"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, _Channel] = {}

    def renew(self) -> None:
        """Pairs are objects of this process: no stranger can be on one."""

    def open(self, rank: int, lane: bytes, exchange: Exchange) -> LoopbackPair:
        with self._lock:
            channel = self._waiting.pop(lane, None)
            if channel is None:
                channel = self._waiting[lane] = _Channel()
        exchange.put(lane)
        try:
            if exchange.get(OPEN_TIMEOUT_S) != lane:
                raise PeerLost("the peer opened another lane")
        except (DeadlineExceeded, PeerLost):
            with self._lock:
                self._waiting.pop(lane, None)
            raise
        return LoopbackPair(channel)
