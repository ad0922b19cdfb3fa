"""Hypothesis state machines run for a counted number of steps."""

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

SLICE_STEPS, FULL_STEPS = 4_000, 110_000
"""Checks of the invariants: one at the start of a story and one after each rule; 110,000 are over 100,000 rules."""


def run_steps(machine: type[RuleBasedStateMachine], is_full: bool, steps_per_example: int = 50) -> int:
    """Random stories of `machine` until its invariants were checked FULL_STEPS times (SLICE_STEPS in a slice).

    Returns how often. Hypothesis decides how long a story is: an example has up to `steps_per_example` steps.
    """
    wanted, seen = FULL_STEPS if is_full else SLICE_STEPS, 0

    class Counted(machine):  # type: ignore[misc, valid-type]
        def check_invariants(self, *arguments: object, **named: object) -> None:
            nonlocal seen
            seen += 1
            super().check_invariants(*arguments, **named)

    Counted.__name__ = Counted.__qualname__ = machine.__name__
    while seen < wanted:
        examples = max(20, min(1000, (wanted - seen) // steps_per_example + 1))
        run_state_machine_as_test(
            Counted,
            settings=settings(max_examples=examples, stateful_step_count=steps_per_example, deadline=None),
        )
    return seen
