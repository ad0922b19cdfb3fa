"""A cost table from timed steps of a runner whose costs are known."""

from collections.abc import Callable

import pytest

from workers.engine.config import EngineConfig
from workers.engine.cost import MeasuredCosts, StepShape
from workers.engine.plan import RunResult, StepPlan
from workers.runner.calibrate import TIME_S, measure_costs


class TimedRunner:
    """Steps take what `milliseconds` says, on a clock of its own; the first one takes ten times as long."""

    def __init__(self, scale: float = 1.0) -> None:
        self.now, self.num_steps, self._scale = 0.0, 0, scale

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        shape = StepShape()
        for chunk in plan.chunks:
            assert max(chunk.first_position + len(chunk.tokens) for chunk in plan.chunks) <= 2048
            if chunk.is_prompt:
                shape.add_prompt(len(chunk.tokens), chunk.first_position)
            else:
                shape.add_decode(chunk.first_position)
        self.now += (10 if not self.num_steps else 1) * self.milliseconds(shape) / 1000
        self.num_steps += 1
        return RunResult([0] * len(plan.chunks), [None] * len(plan.chunks))

    def milliseconds(self, shape: StepShape) -> float:
        tokens = shape.decode_rows + shape.prompt_tokens
        return self._scale * (1.5 + 0.5 * tokens + 0.002 * shape.decode_context + 0.0001 * shape.prompt_pairs)


def config(max_context_tokens: int = 2048) -> EngineConfig:
    return EngineConfig(
        block_tokens=16, num_blocks=200, chunk_tokens=128, max_running=8, max_context_tokens=max_context_tokens
    )


def test_the_table_predicts_what_was_never_measured() -> None:
    runner = TimedRunner()
    costs = MeasuredCosts(measure_costs(runner, config(), lambda: runner.now))
    assert runner.now <= TIME_S + 0.1
    for rows, row_context, prompt, context in ((3, 0, 0, 0), (0, 0, 200, 0), (5, 900, 0, 0), (7, 300, 90, 1500)):
        shape = StepShape()
        for _ in range(rows):
            shape.add_decode(row_context)
        if prompt:
            shape.add_prompt(prompt, context)
        assert costs.predict(shape) == pytest.approx(runner.milliseconds(shape), rel=0.05)


@pytest.mark.parametrize(("scale", "max_context"), [(1000.0, 2048), (1.0, 2), (1.0, 40), (1.0, 64)])
def test_a_slow_model_and_a_short_context_get_a_coarser_table(scale: float, max_context: int) -> None:
    runner = TimedRunner(scale)
    table = measure_costs(runner, config(max_context), lambda: runner.now)
    assert table.ms_per_decode_context == table.ms_per_pair == 0.0
    assert runner.num_steps >= 4
    assert table.decodes(1) == pytest.approx(2.0 * scale)
