"""What the acceptance lines of the main job share: workers in processes of their own behind a front door, and Ray."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from tests.support.front_door import FrontDoor
from tests.support.local_cluster import LocalCluster
from tests.support.real_server import RealServer
from workers.protocol import Role

MakeHouse = Callable[..., "House"]


class House:
    """A prefill and a decode worker and a router with HTTP in front of them."""

    def __init__(self, cluster: LocalCluster, door: FrontDoor) -> None:
        self.cluster, self.door = cluster, door

    def restart(self, role: Role) -> None:
        """kill -9 and a new incarnation, announced as the membership would."""
        self.cluster.restart(role)
        self.door.set_workers(self.cluster.endpoints)

    def worker(self, role: Role) -> dict[str, Any]:
        (found,) = [w for w in self.door.status()["workers"] if w["pool"] == role and w["listed"]]
        return dict(found)


@contextmanager
def open_house(folder: Path, model: Path, router: dict[str, Any], settings: dict[str, Any]) -> Iterator[House]:
    config = RouterConfig(model_id="test-model", model_path=str(model), **router)
    with LocalCluster(folder, model, **settings) as cluster, FrontDoor(config, cluster.ring) as door:
        door.set_workers(cluster.endpoints)
        door.wait_ready(len(cluster.workers))
        yield House(cluster, door)
        door.wait_idle()


@pytest.fixture
def make_house(tmp_path: Path, smollm2: Path) -> Iterator[MakeHouse]:
    """make_house(**replica settings) -> House; every worker must end with nothing in use and its pool in order."""
    with ExitStack() as stack:

        def make(*, router: dict[str, Any] | None = None, **settings: Any) -> House:
            folder = tmp_path / f"house-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return stack.enter_context(open_house(folder, smollm2, router or {}, settings))

        yield make


@pytest.fixture(scope="session")
def real_server() -> Iterator[RealServer]:
    """The real cluster, shared by the lines that leave it whole."""
    server = RealServer()
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()
