"""Fixtures that every layer may use, and the switch between an acceptance line's slice and its full run."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("baton", deadline=None)  # machines are shared: an example may take long by chance
settings.load_profile("baton")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run acceptance lines whole (make accept-main, accept-engine), not their slices",
    )


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    """Whether an acceptance line runs whole; a slice is bounded and seeded."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, converted once into the user's cache; fetched when absent."""
    from cluster.config import ModelConfig, find_config
    from cluster.env import cache_dir
    from cluster.model_store import ensure_model
    from cluster.yaml_source import load_yaml

    return ensure_model(load_yaml(find_config("models", "smollm2-135m"), ModelConfig), cache_dir())
