"""How long a step takes, as a function of what runs in it: measured at load, corrected by every step. Pure.

    step_ms = decodes(rows) + rows' context * a  +  prompt(tokens) - prompt(0) + pairs * b
              \\______ decode part ___________/      \\_________ prompt part _________/

`decodes` and `prompt` are broken lines through measured points, because few rows are bound by the weights' bytes and
many by arithmetic. A pair is one prompt token reading one token of context. Each part has a factor that follows the
machine: a step that a neighbour slowed down moves it by a tenth at most.
"""

import bisect
from dataclasses import dataclass
from typing import Protocol

WEIGHT = 0.1
MOST_CHANGE = 2.0
"""One step counts as at most this many times slower or faster than expected."""
FACTOR_RANGE = (0.02, 50.0)


@dataclass(slots=True)
class StepShape:
    """What runs in one step."""

    decode_rows: int = 0
    decode_context: int = 0
    """Tokens that these rows read, all together."""
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    """Tokens that the prompt tokens read, all together."""

    def add_decode(self, context: int) -> None:
        self.decode_rows += 1
        self.decode_context += context

    def add_prompt(self, num_tokens: int, context: int) -> None:
        """`context`: tokens before the first of them."""
        self.prompt_tokens += num_tokens
        self.prompt_pairs += pairs_of(num_tokens, context)


def pairs_of(num_tokens: int, context: int) -> int:
    """Tokens read by `num_tokens` prompt tokens after `context` others; each also reads itself and those before it."""
    return num_tokens * context + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """Milliseconds by count, straight between measured points and beyond the outer ones; never below 0."""

    points: tuple[tuple[int, float], ...]
    """(count, milliseconds), counts rising; one point is a line through 0."""

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.points]
        if not counts or counts != sorted(set(counts)) or counts[0] < 1:
            raise ValueError(f"measured counts {counts} need to be positive and rising")

    def __call__(self, count: int) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1] * count / points[0][0]
        right = min(max(bisect.bisect_left(points, (count, 0.0)), 1), len(points) - 1)
        (low, low_ms), (high, high_ms) = points[right - 1], points[right]
        return max(0.0, low_ms + (high_ms - low_ms) * (count - low) / (high - low))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """The measured costs of one model on one machine."""

    decodes: BrokenLine
    """Rows of requests that decode, with hardly any context."""
    prompt: BrokenLine
    """Tokens of one prompt from its start; their own pairs are in it."""
    ms_per_decode_context: float
    ms_per_pair: float

    def decode_ms(self, shape: StepShape) -> float:
        if not shape.decode_rows:
            return 0.0
        return self.decodes(shape.decode_rows) + self.ms_per_decode_context * shape.decode_context

    def prompt_ms(self, shape: StepShape) -> float:
        """What the prompt tokens add to the step: beside decodes the weights are read anyway."""
        if not shape.prompt_tokens:
            return 0.0
        fixed = self.prompt(0) if shape.decode_rows else 0.0
        return self.prompt(shape.prompt_tokens) - fixed + self.ms_per_pair * shape.prompt_pairs


class StepCosts(Protocol):
    """What the scheduler asks; tests and a simulator give fixed answers."""

    def predict(self, shape: StepShape) -> float:
        """Milliseconds."""
        ...

    def tokens_for(self, budget_ms: float, shape: StepShape, context: int, most: int) -> int:
        """The most prompt tokens after `context` others, at most `most`, that keep `shape` with them within
        `budget_ms`."""
        ...

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        """A step of this shape has taken so long."""
        ...


class MeasuredCosts:
    """A cost table with factors that follow the machine. Owned by the engine thread."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.decode_factor = self.prompt_factor = 1.0

    def predict(self, shape: StepShape) -> float:
        decode_ms, prompt_ms = self.table.decode_ms(shape), self.table.prompt_ms(shape)
        return self.decode_factor * decode_ms + self.prompt_factor * prompt_ms

    def tokens_for(self, budget_ms: float, shape: StepShape, context: int, most: int) -> int:
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._with_prompt(shape, middle, context) <= budget_ms:
                low = middle
            else:
                high = middle
        return low

    def _with_prompt(self, shape: StepShape, num_tokens: int, context: int) -> float:
        pairs = shape.prompt_pairs + pairs_of(num_tokens, context)
        tokens = shape.prompt_tokens + num_tokens
        return self.predict(StepShape(shape.decode_rows, shape.decode_context, tokens, pairs))

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        decode_ms = self.decode_factor * self.table.decode_ms(shape)
        prompt_ms = self.prompt_factor * self.table.prompt_ms(shape)
        if prompt_ms >= decode_ms and prompt_ms:
            self.prompt_factor = _follow(self.prompt_factor, (milliseconds - decode_ms) / prompt_ms)
        elif decode_ms and not shape.prompt_tokens:
            self.decode_factor = _follow(self.decode_factor, milliseconds / decode_ms)


def _follow(factor: float, ratio: float) -> float:
    """`factor` a little nearer to `ratio` times itself."""
    bounded = min(max(ratio, 1 / MOST_CHANGE), MOST_CHANGE)
    return min(max(factor * (1 + WEIGHT * (bounded - 1)), FACTOR_RANGE[0]), FACTOR_RANGE[1])
