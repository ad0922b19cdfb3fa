"""Drives an engine over a real or fake runner: requests arrive when told, tokens come back by request."""

from collections.abc import Sequence
from typing import NamedTuple

from workers.engine.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.plan import Runner
from workers.engine.request import Request
from workers.protocol import SamplingParams, StreamKey


class Replayed(NamedTuple):
    tokens: list[list[int]]
    num_preempted: int
    num_cached: list[int]
    """Prompt tokens that each request found in the prefix cache."""


def replay(
    runner: Runner, config: EngineConfig, prompts: Sequence[Sequence[int]], num_tokens: int, stagger_steps: int = 0,
    temperature: float = 0.0,
) -> Replayed:  # fmt: skip
    """Tokens of each prompt, greedy unless there is a temperature; request i arrives at step i * stagger_steps. Every
    block is free at the end.
    """
    steps = num_preempted = 0
    engine = Engine(config, runner)
    waiting = list(enumerate(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    num_cached = [0] * len(prompts)
    while waiting or engine.has_work:
        while waiting and waiting[0][0] * stagger_steps <= steps:
            index, prompt = waiting[0]
            request = Request(
                key=StreamKey(index.to_bytes(16, "big"), 1), known=list(prompt), num_prompt=len(prompt),
                sampling=SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=index),
                arrival=float(index),
            )  # fmt: skip
            if not engine.reserve(request, config.pages_for(len(prompt))):
                break
            num_cached[index] = request.num_cached
            engine.start(request.key)
            waiting.pop(0)
        result = engine.step()
        num_preempted += len(result.preempted)
        for output in result.outputs:
            assert output.position == len(tokens[int.from_bytes(output.key.stream, "big")])
            tokens[int.from_bytes(output.key.stream, "big")].append(output.token)
        steps += 1
        assert steps < 100_000, "the engine makes no progress"
    engine.check_integrity()
    assert engine.pool.num_available == config.num_blocks
    return Replayed(tokens, num_preempted, num_cached)
