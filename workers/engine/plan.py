"""What crosses between engine and runner: the plan of one step down, its tokens up. Pure data and two seams."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from workers.protocol import Logprobs, SamplingParams, StreamKey


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request that run in one step."""

    key: StreamKey
    tokens: tuple[int, ...]
    """Token ids to run."""
    first_position: int
    """Position of the first of them in the request; everything before it is in the KV cache."""
    tables: tuple[tuple[int, ...], ...]
    """Block tables, one per state group: position p lies in entry p // block_tokens, NULL_BLOCK where no token of the
    step looks."""
    sampling: SamplingParams | None
    """None: more known tokens follow and nothing is sampled."""
    output_position: int
    """Index of the sampled token among the stream's output tokens: the counter of the random generator."""
    explain: bool
    is_prompt: bool
    history: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """(prompt, output) so far, where the sampling settings look back."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decode chunks first, then prompt chunks; no request twice."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RunResult:
    """One entry per chunk of the plan, in its order."""

    tokens: list[int | None]
    """The sampled token; None where nothing is sampled."""
    explains: list[dict[str, Any] | None]
    """JSON-able facts of the sampled token where the chunk asks to explain."""
    step_us: int = 0
    """Microseconds of the whole call."""
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """By index of the chunk, where its settings ask for them."""


def ignore_layer(layer: int) -> None:
    """Nobody listens to the layers of a step: what knows this function need not call it. A call from native code takes
    the interpreter's lock, which another thread may hold for milliseconds."""


class Runner(Protocol):
    """Computes a plan; the real one is `runner/model_runner.py`."""

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        """Write the KV cache of every token of the plan and sample where asked.

        Calls `on_layer(layer)` on the calling thread for each layer in order, once that layer's KV of the whole plan is
        final. Raises `StepFailed` when the numbers are no numbers.
        """
        ...


class StepObserver(Protocol):
    """Sees each step from inside, on the engine thread; must not call the engine."""

    def planned(self, plan: StepPlan) -> None:
        """The plan is about to run."""

    def layer_done(self, plan: StepPlan, layer: int) -> None:
        """The KV of this layer is written for every token of the plan."""

    def computed(self, plan: StepPlan) -> None:
        """The plan has run; nothing is emitted yet."""
