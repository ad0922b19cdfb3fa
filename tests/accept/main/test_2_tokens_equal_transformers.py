"""Line 2: greedy tokens equal transformers `generate` in fp32, through the disaggregated path, however they are
computed.
"""

from pathlib import Path

import pytest

from tests.accept.main.conftest import MakeHouse
from tests.support.house import House
from tests.support.oracle import LENGTHS, NEW_TOKENS, Expected, expect, make_prompts
from tests.support.oracle import SLICE as SHORT
from workers.protocol import SamplingParams

pytestmark = [pytest.mark.numerics, pytest.mark.integration, pytest.mark.timeout(3600)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, stop_token_ids=(2,))
SLICE = (*SHORT, 333)


@pytest.fixture(scope="module")
def expected(smollm2: Path, is_full: bool) -> dict[int, Expected]:
    """By prompt length. Each expectation asserts that the oracle's top-2 margin is >= 1e-3 at every step."""
    found = [expect(smollm2, prompt) for prompt in make_prompts(smollm2) if is_full or len(prompt) in SLICE]
    return {len(e.prompt): e for e in found}


def check_equal(house: House, wanted: list[Expected], *, at_once: bool = False, stagger_s: float = 0.0) -> None:
    before = house.worker("prefill")["computed_prompt_tokens"]["routine"]
    cached = 0
    groups = [wanted[i : i + 16] for i in range(0, len(wanted), 16)] if at_once else [[e] for e in wanted]
    for group in groups:
        answers = house.door.generate([e.prompt for e in group], GREEDY, stagger_s=stagger_s)
        for one, answer in zip(group, answers, strict=True):
            assert answer.tokens == one.tokens, f"prompt of {len(one.prompt)} tokens"
            cached += answer.stream.num_cached
    house.door.wait_idle()
    computed = house.worker("decode")["computed_prompt_tokens"]
    assert computed == dict.fromkeys(computed, 0), "decode computed prompt tokens"
    routine = house.worker("prefill")["computed_prompt_tokens"]["routine"]
    assert routine - before == sum(len(e.prompt) for e in wanted) - cached


def test_there_are_twenty_prompts_of_1_to_1500_tokens(smollm2: Path) -> None:
    lengths = [len(prompt) for prompt in make_prompts(smollm2)]
    assert len(lengths) >= 20
    assert (min(lengths), max(lengths)) == (1, 1500)
    assert tuple(lengths) == LENGTHS


def test_alone_and_sixteen_at_once(make_house: MakeHouse, expected: dict[int, Expected]) -> None:
    house, wanted = make_house(), list(expected.values())
    check_equal(house, wanted)
    crowd = (wanted * 16)[: max(16, len(wanted))]
    check_equal(house, crowd, at_once=True, stagger_s=0.03)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """tests/accept/engine/test_1 has every chunk size inside one process, in its slice, too."""
    if "chunk_tokens" in metafunc.fixturenames:
        sizes = {"1": 1, "whole": 8192} if metafunc.config.getoption("--full") else {}
        sizes |= {"7": 7, "64": 64}
        metafunc.parametrize("chunk_tokens", sizes.values(), ids=sizes)


def test_in_chunks(make_house: MakeHouse, expected: dict[int, Expected], chunk_tokens: int, is_full: bool) -> None:
    longest = {1: 64, 7: 300}.get(chunk_tokens, 1500)
    wanted = [e for n, e in expected.items() if n <= longest or (chunk_tokens == 1 and n == 1500)]
    check_equal(make_house(chunk_tokens=chunk_tokens), wanted, at_once=not is_full)
