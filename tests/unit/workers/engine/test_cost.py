"""Milliseconds of a step from what runs in it, and back."""

import pytest

from workers.engine.cost import BrokenLine, CostTable, MeasuredCosts, StepShape, pairs_of

TABLE = CostTable(
    decodes=BrokenLine(((1, 2.0), (16, 11.0))),
    prompt=BrokenLine(((16, 10.0), (64, 34.0))),
    ms_per_decode_context=0.001,
    ms_per_pair=0.0001,
)


def shape(decodes: int = 0, decode_context: int = 0, prompt: int = 0, context: int = 0) -> StepShape:
    made = StepShape(decodes, decode_context)
    if prompt:
        made.add_prompt(prompt, context)
    return made


def test_a_line_goes_through_its_points_and_on() -> None:
    line = BrokenLine(((2, 3.0), (4, 5.0), (8, 13.0)))
    assert [line(count) for count in (0, 2, 3, 4, 6, 8, 10)] == [1.0, 3.0, 4.0, 5.0, 9.0, 13.0, 17.0]
    assert BrokenLine(((4, 8.0),))(6) == 12.0
    assert BrokenLine(((10, 1.0), (20, 9.0)))(1) == 0.0
    for points in ((), ((4, 1.0), (4, 2.0)), ((0, 1.0),), ((3, 1.0), (2, 1.0))):
        with pytest.raises(ValueError, match="rising"):
            BrokenLine(points)


def test_decodes_and_prompts_share_what_a_step_costs_anyway() -> None:
    assert TABLE.decode_ms(shape(1, 1000)) == pytest.approx(3.0)
    assert TABLE.prompt_ms(shape(prompt=16)) == pytest.approx(10.0 + 0.0136)
    assert TABLE.prompt_ms(shape(1, 0, prompt=16)) == pytest.approx(8.0 + 0.0136)
    assert TABLE.decode_ms(shape(prompt=16)) == TABLE.prompt_ms(shape(4, 100)) == 0.0
    assert pairs_of(3, 10) == 11 + 12 + 13


def test_the_budget_is_kept_and_used() -> None:
    costs = MeasuredCosts(TABLE)
    for base, context in ((shape(), 0), (shape(4, 4000), 3000), (shape(2, 10, prompt=8, context=100), 50)):
        tokens = costs.tokens_for(30.0, base, context, 500)
        assert 0 < tokens < 500
        fits, over = (shape(base.decode_rows, base.decode_context) for _ in range(2))
        for made, more in ((fits, 0), (over, 1)):
            made.prompt_tokens, made.prompt_pairs = base.prompt_tokens, base.prompt_pairs
            made.add_prompt(tokens + more, context)
        assert costs.predict(fits) <= 30.0 < costs.predict(over)
    assert costs.tokens_for(1e9, shape(), 0, 500) == 500
    assert costs.tokens_for(1.0, shape(16), 0, 500) == 0


def test_a_longer_context_leaves_fewer_tokens() -> None:
    costs = MeasuredCosts(TABLE)
    assert costs.tokens_for(30.0, shape(), 8000, 500) < costs.tokens_for(30.0, shape(), 0, 500)


def test_factors_follow_a_slower_machine_and_shrug_at_one_slow_step() -> None:
    costs = MeasuredCosts(TABLE)
    costs.observe(shape(1), 1000.0)
    assert costs.decode_factor == pytest.approx(1.1)
    for _ in range(100):
        costs.observe(shape(1), 3 * TABLE.decode_ms(shape(1)))
        costs.observe(shape(prompt=64), TABLE.prompt_ms(shape(prompt=64)) / 2)
    assert costs.predict(shape(1)) == pytest.approx(3 * TABLE.decode_ms(shape(1)), rel=0.01)
    assert costs.predict(shape(prompt=64)) == pytest.approx(TABLE.prompt_ms(shape(prompt=64)) / 2, rel=0.01)


def test_a_step_teaches_the_part_that_it_is_made_of() -> None:
    costs = MeasuredCosts(TABLE)
    costs.observe(shape(1, 0, prompt=64), 80.0)
    assert (costs.decode_factor, costs.prompt_factor > 1) == (1.0, True)
    costs.observe(shape(16, 0, prompt=1), 80.0)
    costs.observe(shape(), 80.0)
    assert costs.decode_factor == 1.0
