"""How slow work on model files tells what it is doing."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with a stage in plain words and the share of that stage done, 0.0 to 1.0; never raises, returns at once."""


def ignore_progress(stage: str, done: float) -> None:
    """A `Progress` that shows nothing."""
