"""What the acceptance lines of the main job share: workers in processes of their own behind a front door, and Ray."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.house import House, open_house
from tests.support.real_server import RealServer

MakeHouse = Callable[..., House]


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
