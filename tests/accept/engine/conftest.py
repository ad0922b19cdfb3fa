"""What the acceptance lines of the engine share: models with the oracle's answers, each made once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import families
from tests.support.families import Case, make_case
from tests.support.oracle import LENGTHS, SLICE, expect, make_prompts

GetCase = Callable[[str], Case]


@pytest.fixture(scope="session")
def get_case(tmp_path_factory: pytest.TempPathFactory, smollm2: Path, is_full: bool) -> GetCase:
    """get_case(name of a family or "smollm2") -> Case; the oracle asserts its margins."""
    torch.set_num_threads(1)
    cases: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name == "smollm2":
            prompts = make_prompts(smollm2)
            return Case(name, smollm2, tuple(expect(smollm2, p) for p in prompts if is_full or len(p) in SLICE))
        return make_case(name, tmp_path_factory.mktemp(name), families.LENGTHS if is_full else families.SHORT_LENGTHS)

    def get(name: str) -> Case:
        if name not in cases:
            cases[name] = make(name)
        return cases[name]

    assert set(SLICE) <= set(LENGTHS)
    return get
