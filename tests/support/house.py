"""Workers behind a front door: in processes of their own, or in this one for models so small that imports would cost
more than they do.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kv_transfer.channel import KVSource
from kv_transfer.wire import KeyRing
from router.config import RouterConfig
from tests.support.front_door import FrontDoor
from tests.support.local_cluster import LocalCluster
from workers.protocol import Role, WorkerEndpoint
from workers.replica.config import ReplicaConfig
from workers.replica.leader import Leader

MODEL_ID = "test-model"


class House:
    """A prefill and a decode worker and a router with HTTP in front of them."""

    def __init__(self, cluster: LocalCluster, door: FrontDoor) -> None:
        self.cluster, self.door = cluster, door

    def restart(self, role: Role) -> None:
        """kill -9 and a new incarnation, announced as the membership would."""
        self.cluster.restart(role)
        self.door.set_workers(self.cluster.endpoints)

    def worker(self, role: Role) -> dict[str, Any]:
        return find_worker(self.door, role)


def find_worker(door: FrontDoor, role: Role) -> dict[str, Any]:
    (found,) = [w for w in door.status()["workers"] if w["pool"] == role and w["listed"]]
    return dict(found)


@contextmanager
def open_house(folder: Path, model: Path, router: dict[str, Any], settings: dict[str, Any]) -> Iterator[House]:
    config = RouterConfig(model_id=MODEL_ID, model_path=str(model), **router)
    with LocalCluster(folder, model, **settings) as cluster, FrontDoor(config, cluster.ring) as door:
        door.set_workers(cluster.endpoints)
        door.wait_ready(len(cluster.workers))
        yield House(cluster, door)
        door.wait_idle()


@contextmanager
def open_room(
    folder: Path, model: Path, tokenizer: Path, roles: Sequence[Role], **settings: Any
) -> Iterator[FrontDoor]:
    """The same in this process: the real leaders, links, sessions and lanes, each with threads of its own.

    A step that raises fails the leaving of the room; every worker must end with its pool in order.
    """
    secret = folder / "secret"
    if not secret.exists():
        KeyRing.write_new(secret)
    base = {"model_path": str(model), "model_id": MODEL_ID, "secret_path": str(secret), **settings}
    disaggregation = "never" if "colocated" in roles else "always"
    router = RouterConfig(model_id=MODEL_ID, model_path=str(tokenizer), disaggregation=disaggregation)
    failures: list[BaseException] = []
    with ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        leaders = [Leader(ReplicaConfig(role=role, **base), failures.append) for role in roles]
        endpoints = [_enter(stack, loop, leader) for leader in leaders]
        sources = [KVSource(e.incarnation, e.host, e.kv_port) for e in endpoints if e.role == "prefill"]
        for leader in leaders:
            leader.set_sources(sources)
        door = stack.enter_context(FrontDoor(router, KeyRing.load(secret)))
        door.set_workers(endpoints)
        door.wait_ready(len(endpoints))
        yield door
        door.wait_idle()
    assert failures == []


def _enter(stack: ExitStack, loop: asyncio.AbstractEventLoop, leader: Leader) -> WorkerEndpoint:
    """Starts the worker; the stack ends it as a drain does."""
    endpoint = loop.run_until_complete(leader.start())

    async def end() -> None:
        await leader.drain()
        await leader.stop()
        leader.engine.check_integrity()

    stack.callback(lambda: loop.run_until_complete(end()))
    return endpoint
