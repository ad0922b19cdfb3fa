"""Two-rank gloo groups, without a world and without a TCPStore.

gloo publishes exactly one address under the key "0/<rank>" and reads "0/<peer>": a local HashStore holds both, and the
lane's own connection carries them. What gloo cannot do shapes this file: its work objects cannot be polled
(`is_completed` is false until `wait`), a `wait` that times out closes the pair, `abort` does nothing, and an operation
in the middle of a message is not woken when the peer dies. So every wait has a thread of its own to block, and a pair
is broken by a receive that times out after one millisecond on a tag of its own; a waiter in the middle of a message
then returns within STUCK_TIMEOUT_S, and nothing is written any more from the moment `poison` returns.

Data sockets of gloo are neither authenticated nor encrypted: `host` must be a private interface. The warm-up of a lane
(`lane.make_warm_up`) tells a stranger who was faster from the peer, and digests in FIN tell altered bytes.
"""

import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kv_transfer.errors import PeerLost, TransferError
from kv_transfer.transports.base import OPEN_TIMEOUT_S, STUCK_TIMEOUT_S, Exchange

_c10d: Any = dist  # its stubs lack HashStore, the options and the two-sided operations
_TAG_RANGE = 1 << 29
_POISON_TAG = (1 << 30) + 1
MAX_DEVICES = 32


class GlooTicket:
    def __init__(self, work: dist.Work, buffer: Tensor) -> None:
        self._work, self.buffer = work, buffer

    def wait(self) -> None:
        try:
            self._work.wait(datetime.timedelta(seconds=STUCK_TIMEOUT_S))
        except RuntimeError as error:
            raise PeerLost(f"gloo operation failed ({type(error).__name__})") from None


class GlooPair:
    """One two-rank group. A tag counts the operations, so that a send can only ever fill the receive of its own
    notice."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._peer = group, 1 - rank
        self._next_tag = 0
        self._lock = threading.Lock()
        self._is_poisoned = False

    def _take_tag(self) -> int:
        self._next_tag = (self._next_tag + 1) % _TAG_RANGE
        return self._next_tag

    def send(self, buffer: Tensor) -> GlooTicket:
        try:
            return GlooTicket(self._group.send([buffer], self._peer, self._take_tag()), buffer)
        except RuntimeError as error:
            raise PeerLost(f"gloo cannot send ({type(error).__name__})") from None

    def receive(self, buffer: Tensor) -> GlooTicket:
        try:
            return GlooTicket(self._group.recv([buffer], self._peer, self._take_tag()), buffer)
        except RuntimeError as error:
            raise PeerLost(f"gloo cannot receive ({type(error).__name__})") from None

    def poison(self) -> None:
        with self._lock:
            if self._is_poisoned:
                return
            try:
                work = self._group.recv([torch.zeros(1)], self._peer, _POISON_TAG)
                work.wait(datetime.timedelta(milliseconds=1))
            except RuntimeError:
                pass  # the time-out is the purpose: it closes the pair
            self._is_poisoned = True


class GlooTransport:
    """Makes pairs on one shared device (a thread and a listener bound to `host`), and on a new one after a failure.

    gloo gives the next pair to whoever names its number on the listener: a stranger who holds numbers would cost every
    later lane, so a pair that did not open is tried again elsewhere. Devices are kept to the end of the process: one
    that is destroyed while its thread runs takes the process with it.
    """

    name = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host
        self._devices = [self._make_device()]

    def _make_device(self) -> Any:
        return _c10d.ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)

    def renew(self) -> None:
        """The next pair opens on another listener; after MAX_DEVICES failures the last one stays."""
        if len(self._devices) < MAX_DEVICES:
            self._devices.append(self._make_device())

    def open(self, rank: int, lane: bytes, exchange: Exchange) -> GlooPair:
        store = _c10d.HashStore()
        store.set_timeout(datetime.timedelta(seconds=OPEN_TIMEOUT_S))
        failures: list[Exception] = []

        def relay() -> None:
            try:
                exchange.put(store.get(f"0/{rank}"))
                store.set(f"0/{1 - rank}", exchange.get(OPEN_TIMEOUT_S))
            except (TransferError, RuntimeError) as error:
                failures.append(error)

        relaying = threading.Thread(target=relay, name=f"kv-relay-{lane.hex()[:6]}", daemon=True)
        relaying.start()
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [self._devices[-1]]
        options._threads = 1
        options._timeout = datetime.timedelta(seconds=OPEN_TIMEOUT_S)
        try:
            return GlooPair(_c10d.ProcessGroupGloo(store, rank, 2, options), rank)
        except RuntimeError as error:
            cause = failures[0] if failures else error
            self.renew()
            raise PeerLost(f"gloo pair did not open ({type(cause).__name__})") from None
        finally:
            relaying.join(OPEN_TIMEOUT_S)
