"""Line 1 through real workers: a prefill and a decode worker with a KV cache that moves between them, and one worker
that does both, answer what transformers `generate` answers. The second time the prefix cache of either helps.
"""

from pathlib import Path

import pytest

from tests.accept.engine.conftest import GetCase
from tests.support.families import FOREIGN, OURS, Case
from tests.support.front_door import FrontDoor, wait_until
from tests.support.house import find_worker, open_room
from tests.support.tiny_tokenizer import write_model_folder
from workers.native.build import LIBRARY
from workers.protocol import Role, SamplingParams

pytestmark = [pytest.mark.numerics, pytest.mark.integration, pytest.mark.timeout(3600)]

BACKENDS = [
    *((name, "reference") for name in OURS),
    *((name, "native") for name in (*OURS, "smollm2")),
    *((name, "transformers") for name in FOREIGN),
]
ROLES: dict[str, tuple[Role, ...]] = {"disaggregated": ("prefill", "decode"), "colocated": ("colocated",)}
SHAPES = {
    "tiny": {"block_tokens": 4, "num_blocks": 600, "max_context_tokens": 128, "chunk_tokens": 16, "min_unit_bytes": 64},
    "smollm2": {"block_tokens": 16, "num_blocks": 800, "max_context_tokens": 2048, "chunk_tokens": 64},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """tests/accept/main/test_2 sends SmolLM2's cache between processes; a slice leaves it at that."""
    is_full = metafunc.config.getoption("--full")
    chosen = [
        pytest.param(*pair, roles, id="-".join((*pair, roles))) for pair in BACKENDS for roles in ROLES
        if is_full or (pair[0], roles) != ("smollm2", "disaggregated")
    ]  # fmt: skip
    metafunc.parametrize(("name", "backend", "roles"), chosen)


def test_tokens_equal_transformers(tmp_path: Path, get_case: GetCase, name: str, backend: str, roles: str) -> None:
    if backend == "native" and not LIBRARY.exists():
        pytest.skip("the native kernels are not built")
    case, shape = get_case(name), SHAPES.get(name, SHAPES["tiny"])
    tokenizer = write_model_folder(tmp_path / "tokenizer")
    with open_room(tmp_path, case.folder, tokenizer, ROLES[roles], backend=backend, **shape) as door:
        computes = ROLES[roles][0]
        for turn in ("miss", "hit"):
            before = num_computed(door, computes)
            check(door, case, at_once=turn == "hit")
            wait_until(lambda: num_computed(door, computes) > before, "the worker has told of its work")  # noqa: B023
            given = sum(map(len, case.prompts))
            if turn == "miss":
                wait_until(lambda: num_computed(door, computes) == before + given, "every prompt token is computed")  # noqa: B023
            assert num_computed(door, computes) - before <= (given if turn == "miss" else given - 1)
        if roles == "disaggregated":
            assert num_computed(door, "decode") == 0


def num_computed(door: FrontDoor, role: Role) -> int:
    """Prompt tokens that the worker has computed, for whatever reason."""
    door.wait_idle()
    return sum(find_worker(door, role)["computed_prompt_tokens"].values())


def check(door: FrontDoor, case: Case, *, at_once: bool) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=case.new_tokens)
    for group in [case.prompts] if at_once else [[prompt] for prompt in case.prompts]:
        for prompt, answer in zip(group, door.generate(group, sampling), strict=True):
            assert list(answer.tokens) == case.answers[case.prompts.index(prompt)], f"prompt of {len(prompt)} tokens"
