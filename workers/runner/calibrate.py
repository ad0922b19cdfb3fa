"""What a step takes on this machine: a few timed steps of a runner whose cache nobody uses yet.

Rows and prompt tokens run once at least; repeats, and what a long context adds, come while there is time. On a slow or
busy machine the table is coarser, and the steps themselves correct it.
"""

import time
from collections.abc import Callable

from workers.engine.config import EngineConfig
from workers.engine.cost import BrokenLine, CostTable, pairs_of
from workers.engine.plan import Chunk, Runner, StepPlan
from workers.protocol import SamplingParams, StreamKey

TIME_S = 0.4
REPEATS = 3
DECODE_ROWS = (1, 16)
PROMPT_TOKENS = (16, 64)
LONG_CONTEXT = 1024


def measure_costs(runner: Runner, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> CostTable:
    """The cost table of `runner`. Takes TIME_S, and five steps at least; writes into the cache."""
    return _Calibration(runner, config, clock).measure()


class _Calibration:
    """Tokens are 0 and tables name the same few blocks: time does not depend on values, and nothing is read later."""

    def __init__(self, runner: Runner, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._runner, self._config, self._clock = runner, config, clock
        self._ends = clock() + TIME_S
        self._context = max(0, min(LONG_CONTEXT, config.max_context_tokens - max(PROMPT_TOKENS)))

    def measure(self) -> CostTable:
        self._step(1, 1, 0)  # the first one also warms up
        sizes = tuple(sorted({min(num, self._config.max_context_tokens) for num in PROMPT_TOKENS}))
        decodes = self._line(DECODE_ROWS, lambda num: self._best(num, 1, 0))
        prompt = self._line(sizes, lambda num: self._best(1, num, 0))
        fewest, context = prompt.points[0][0], self._context
        if not context or self._clock() > self._ends:
            return CostTable(decodes=decodes, prompt=prompt, ms_per_decode_context=0.0, ms_per_pair=0.0)
        longer = self._best(1, 1, context) - decodes.points[0][1]
        wider = self._best(1, fewest, context) - prompt.points[0][1]
        return CostTable(
            decodes=decodes,
            prompt=prompt,
            ms_per_decode_context=max(0.0, longer / context),
            ms_per_pair=max(0.0, wider / (pairs_of(fewest, context) - pairs_of(fewest, 0))),
        )

    def _line(self, counts: tuple[int, ...], best: Callable[[int], float]) -> BrokenLine:
        points: list[tuple[int, float]] = []
        for count in counts:
            # A larger step that seems faster met a quieter moment.
            points.append((count, max(best(count), points[-1][1] if points else 0.0)))
        return BrokenLine(tuple(points))

    def _best(self, num_requests: int, num_tokens: int, context: int) -> float:
        """Milliseconds of the fastest of up to REPEATS equal steps."""
        times = [self._step(num_requests, num_tokens, context)]
        while len(times) < REPEATS and self._clock() < self._ends:
            times.append(self._step(num_requests, num_tokens, context))
        return min(times)

    def _step(self, num_requests: int, num_tokens: int, context: int) -> float:
        num_pages = self._config.pages_for(context + num_tokens)
        tables = [
            tuple((row + page) % self._config.num_blocks for page in range(num_pages)) for row in range(num_requests)
        ]
        chunks = tuple(
            Chunk(
                StreamKey(row.to_bytes(16, "big"), 0), (0,) * num_tokens, context, (table,) * len(self._config.windows),
                SamplingParams(), 0, explain=False, is_prompt=num_tokens > 1,
            )
            for row, table in enumerate(tables)
        )  # fmt: skip
        begun = self._clock()
        self._runner.execute(StepPlan(chunks), lambda layer: None)
        return (self._clock() - begun) * 1000
