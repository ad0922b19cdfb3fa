"""Costs of a step that never change: for schedulers and roles in tests."""

from workers.engine.cost import StepShape


class FixedCosts:
    """So many milliseconds per decode row and per prompt token; `seen` is the last step that was observed."""

    def __init__(self, ms: float = 1.0) -> None:
        self.ms = ms
        self.seen: tuple[int, int, float] | None = None

    def predict(self, shape: StepShape) -> float:
        return self.ms * (shape.decode_rows + shape.prompt_tokens)

    def tokens_for(self, budget_ms: float, shape: StepShape, context: int, most: int) -> int:
        return max(0, min(most, int((budget_ms - self.predict(shape)) / self.ms)))

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        self.seen = (shape.decode_rows, shape.prompt_tokens, milliseconds)
