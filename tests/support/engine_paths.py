"""The ways by which a prompt's tokens come about in one engine: each must answer what the oracle answers.

A path asserts that it was really gone: that something was preempted, or found in the prefix cache.
"""

from collections.abc import Callable

from tests.support.decoder_runs import generate
from tests.support.families import Case
from workers.runner.probe import Model

Path = Callable[[Model, Case], None]

LONGEST = {1: 64, 7: 300}
"""Prompt tokens that chunks of so few are tried on."""


FEW = ("alone-whole", "alone-chunks-of-7", "sixteen-staggered", "prefix-hit-and-miss")
"""Those of `PATHS` that a slice goes where a step is slow."""


def blocks_for(case: Case, num_prompts: int, block_tokens: int) -> int:
    """A pool in which so many of the longest prompts find room with their answers."""
    longest = max(map(len, case.prompts)) + case.new_tokens
    return num_prompts * -(-longest // block_tokens)


def alone(chunk: int) -> Path:
    """Each prompt in an engine of its own, `chunk` tokens a step."""

    def run(model: Model, case: Case) -> None:
        longest = LONGEST.get(chunk, 1 << 30)
        for prompt, answer in zip(case.prompts, case.answers, strict=True):
            if len(prompt) <= longest:
                blocks = blocks_for(case, 1, 16)
                found = generate(model, [prompt], case.new_tokens, chunk, 0, 16, blocks, prefix_cache=False)
                assert found.tokens == [answer], f"prompt of {len(prompt)} tokens"

    return run


def staggered(block_tokens: int) -> Path:
    """Sixteen at once, each two steps after the one before, the longest first."""

    def run(model: Model, case: Case) -> None:
        crowd = sorted(range(len(case.prompts)), key=lambda i: -len(case.prompts[i])) * 16
        crowd = crowd[: max(16, len(case.prompts))]
        blocks = blocks_for(case, 16, block_tokens)
        found = generate(
            model, [case.prompts[i] for i in crowd], case.new_tokens, 24, 2, block_tokens, blocks, prefix_cache=False
        )
        assert found.tokens == [case.answers[i] for i in crowd]
        assert found.num_preempted == 0

    return run


def preempted(*, prefix_cache: bool) -> Path:
    """In a pool so small that running requests lose their blocks and are computed again."""

    def run(model: Model, case: Case) -> None:
        crowd = (sorted(case.expected, key=lambda e: len(e.prompt))[:4] * 3)[:12]
        longest = -(-(len(crowd[3].prompt) + case.new_tokens) // 4)
        blocks = max(longest, sum(-(-len(each.prompt) // 4) for each in crowd) // 2)
        found = generate(
            model, [each.prompt for each in crowd], case.new_tokens, 32, 1, 4, blocks, prefix_cache=prefix_cache
        )
        assert found.num_preempted > 0
        assert found.tokens == [list(each.tokens) for each in crowd]

    return run


def prefix_hit(model: Model, case: Case) -> None:
    """Each prompt three times in turn: as a miss, as a hit, and grown by the first tokens of its answer."""
    block_tokens, grown = 4, case.new_tokens // 2
    together, wanted = [], []
    for prompt, answer in zip(case.prompts, case.answers, strict=True):
        together += [prompt, prompt, (*prompt, *answer[:grown])]
        wanted += [answer, answer, answer[grown:]]
    found = generate(model, together, case.new_tokens, 16, 0, block_tokens, blocks_for(case, 4, 4), max_running=1)
    for first in range(0, len(together), 3):
        prompt = together[first]
        assert found.num_cached[first : first + 3] == [
            0,
            (len(prompt) - 1) // block_tokens * block_tokens,
            (len(prompt) + grown - 1) // block_tokens * block_tokens,
        ]
    assert [tokens[: len(w)] for tokens, w in zip(found.tokens, wanted, strict=True)] == wanted


PATHS: dict[str, Path] = {
    "alone-whole": alone(1 << 20),
    "alone-chunks-of-1": alone(1),
    "alone-chunks-of-7": alone(7),
    "alone-chunks-of-64": alone(64),
    "sixteen-staggered": staggered(16),
    "sixteen-staggered-small-blocks": staggered(3),
    "preempted-and-recomputed": preempted(prefix_cache=False),
    "preempted-and-resumed-from-the-cache": preempted(prefix_cache=True),
    "prefix-hit-and-miss": prefix_hit,
}
