"""The collectives of a tensor-parallel group: gloo between CPUs, NCCL between GPUs, without a world and without a
TCPStore.

gloo publishes one address a rank under "0/RANK" and waits for the others'; NCCL's rank 0 publishes one id under "0" for
all. A HashStore in each process holds them, and the group's own connections carry them. A collective of gloo that does
not end within its deadline raises, as does one whose peer has died; nothing of the group can be used afterwards. A lost
rank of NCCL shows on the group's connections, and the process ends. Data sockets of either are neither authenticated
nor encrypted: `host` must be a private interface.
"""

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kv_transfer.errors import PeerLost, TransferError
from workers.model.sharding import cut

_c10d: Any = dist  # its stubs lack HashStore and the options
OPEN_TIMEOUT_S = 30.0
NCCL_ID_KEY, NO_ADDRESS = "0", b"-"
STEP_TIMEOUT_S = 60.0
"""Of one collective: the slowest rank's part of a layer."""


def join_gloo(
    rank: int,
    num_ranks: int,
    host: str,
    exchange: Callable[[bytes], tuple[bytes, ...]],
    timeout_s: float = STEP_TIMEOUT_S,
) -> Any:
    """The group, once every rank has called this. `exchange` gives this rank's address away and returns all ranks', in
    order. Raises `PeerLost`.
    """
    store = _c10d.HashStore()
    store.set_timeout(datetime.timedelta(seconds=OPEN_TIMEOUT_S))
    failures: list[Exception] = []

    def relay() -> None:
        try:
            addresses = exchange(store.get(f"0/{rank}"))
            for other, address in enumerate(addresses):
                if other != rank:
                    store.set(f"0/{other}", address)
        except (TransferError, RuntimeError) as error:
            failures.append(error)

    relaying = threading.Thread(target=relay, name="baton-rank-relay", daemon=True)
    relaying.start()
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._threads = 1
    options._timeout = datetime.timedelta(seconds=timeout_s)
    try:
        return _c10d.ProcessGroupGloo(store, rank, num_ranks, options)
    except RuntimeError as error:
        cause = failures[0] if failures else error
        raise PeerLost(f"the ranks did not find each other ({type(cause).__name__})") from None
    finally:
        relaying.join(OPEN_TIMEOUT_S)


def join_nccl(rank: int, num_ranks: int, exchange: Callable[[bytes], tuple[bytes, ...]]) -> Any:
    """The group over the current CUDA device of each rank; two ranks on one GPU cannot join. As `join_gloo`."""
    store = _c10d.HashStore()
    store.set_timeout(datetime.timedelta(seconds=OPEN_TIMEOUT_S))
    failures: list[Exception] = []

    def relay() -> None:
        try:
            addresses = exchange(store.get(NCCL_ID_KEY) if rank == 0 else NO_ADDRESS)
            if rank:
                store.set(NCCL_ID_KEY, addresses[0])
        except (TransferError, RuntimeError) as error:
            failures.append(error)

    relaying = threading.Thread(target=relay, name="baton-rank-relay", daemon=True)
    relaying.start()
    try:
        group = _c10d.ProcessGroupNCCL(store, rank, num_ranks, _c10d.ProcessGroupNCCL.Options())
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        cause = failures[0] if failures else error
        raise PeerLost(f"the ranks did not find each other ({type(cause).__name__})") from None
    finally:
        relaying.join(OPEN_TIMEOUT_S)
    return group


class GroupCollective:
    """Implements `model/collective.py`'s `Collective` over either group."""

    def __init__(self, group: Any, rank: int, num_ranks: int, vocab_size: int) -> None:
        self._group, self._rank = group, rank
        self._widths = [len(cut(other, num_ranks, vocab_size)) for other in range(num_ranks)]

    def add(self, x: Tensor) -> Tensor:
        """In place. Each part is summed at one rank and copied to the others: equal everywhere to the last bit."""
        x = x.contiguous()
        self._wait(lambda: self._group.allreduce([x]))
        return x

    def gather(self, x_RV: Tensor) -> Tensor:
        """Parts are gathered when equal: the narrower ones travel with a column of padding."""
        widest = max(self._widths)
        padded_RV = torch.nn.functional.pad(x_RV, (0, widest - x_RV.shape[1])).contiguous()
        outputs = [[torch.empty_like(padded_RV) for _ in self._widths]] if self._rank == 0 else []
        self._wait(lambda: self._group.gather(outputs, [padded_RV], _c10d.GatherOptions()))
        if self._rank:
            return x_RV
        return torch.cat([part_RV[:, :width] for part_RV, width in zip(outputs[0], self._widths, strict=True)], dim=1)

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise PeerLost(f"a collective failed ({type(error).__name__}): a rank is gone or stuck") from None
