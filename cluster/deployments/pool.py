"""One worker replica of a pool under Ray Serve. Prefill and decode differ by the role in their configuration alone.

Serve starts it, checks it, replaces it and drains it; no request passes here. The replica says where it can be dialled
in its metadata, and a decode replica keeps its leader informed of the prefill workers.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cluster.board import describe_worker
from cluster.logs import open_log
from cluster.loopback import move_replica_listener
from workers.protocol import WorkerEndpoint
from workers.replica.config import ReplicaConfig

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from kv_transfer.channel import KVSource


class ReplicaLeader(Protocol):
    """What a pool needs of `workers.replica.leader.Leader`."""

    async def start(self) -> WorkerEndpoint: ...

    def set_sources(self, sources: "Sequence[KVSource]") -> None: ...

    def health(self) -> str | None: ...

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...


MakeLeader = Callable[[ReplicaConfig], ReplicaLeader]


def load_leader(config: ReplicaConfig) -> ReplicaLeader:
    """The real leader with its model loaded (seconds). Imports torch."""
    from workers.replica.leader import Leader

    return Leader(config)


class PoolReplica:
    """Constructed by Serve. `prefill` is the handle of the pool whose KV caches this replica receives, for membership
    only.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self,
        config: ReplicaConfig,
        make_leader: MakeLeader,
        prefill: "DeploymentHandle | None" = None,
        log_folder: str = "",
    ) -> None:
        open_log(log_folder, f"{config.role}-{os.getpid()}")
        move_replica_listener()
        self._leader = await asyncio.to_thread(make_leader, config)
        self._endpoint = await self._leader.start()
        if prefill is not None:
            from cluster.membership import watch

            watch(prefill, self._hear_of_prefill)

    def _hear_of_prefill(self, workers: tuple[WorkerEndpoint, ...]) -> None:
        """On Serve's router thread."""
        from kv_transfer.channel import KVSource

        self._leader.set_sources([KVSource(worker.incarnation, worker.host, worker.kv_port) for worker in workers])

    async def record_replica_metadata(self) -> dict[str, Any]:
        return describe_worker(self._endpoint)

    async def check_health(self) -> None:
        """Raises what is wrong; Serve replaces a replica after three failures in a row."""
        if problem := self._leader.health():
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        """Serve awaits this when it removes the replica; accepted work has ended or was handed back afterwards."""
        leader = getattr(self, "_leader", None)
        if leader is not None:
            await leader.drain()
            await leader.stop()
