"""A runner without a model: it keeps token ids where the KV cache would be, and reads them back through block tables.

The next token is a hash of everything the block table shows, so a wrong block, a block given to two requests or a token
computed at a wrong place changes the output.
"""

import zlib
from array import array
from collections.abc import Callable, Sequence

from workers.engine.plan import RunResult, StepPlan

VOCAB = 97


def next_token(history: Sequence[int]) -> int:
    """What the fake model answers after `history`."""
    return zlib.crc32(array("q", history).tobytes()) % VOCAB


def continue_text(known: Sequence[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` tokens after `known`, one after the other."""
    history = list(known)
    for _ in range(num_tokens):
        history.append(next_token(history))
    return history[len(known) :]


class FakeRunner:
    """An `engine.plan.Runner`; `plans` keeps what it was given."""

    def __init__(self, block_tokens: int, num_layers: int = 2) -> None:
        self.block_tokens = block_tokens
        self.num_layers = num_layers
        self.plans: list[StepPlan] = []
        self.step_us = 1
        """What each step is said to have taken."""
        self._cells: dict[tuple[int, int], int] = {}

    def fill(self, blocks: Sequence[int], tokens: Sequence[int], skip_tokens: int = 0) -> None:
        """What a transfer does: the cache of `tokens` from `skip_tokens` on appears in `blocks`."""
        for position, token in list(enumerate(tokens))[skip_tokens:]:
            self._cells[blocks[position // self.block_tokens], position % self.block_tokens] = token

    def scribble(self, block: int) -> None:
        """A late write of a transfer into a block that it may still hold."""
        for slot in range(self.block_tokens):
            self._cells[block, slot] = -1

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        assert plan.chunks
        assert len({chunk.key for chunk in plan.chunks}) == len(plan.chunks), "a request is twice in the plan"
        self.plans.append(plan)
        for chunk in plan.chunks:
            for offset, token in enumerate(chunk.tokens):
                block, slot = divmod(chunk.first_position + offset, self.block_tokens)
                self._cells[chunk.blocks[block], slot] = token
        for layer in range(self.num_layers):
            on_layer(layer)
        tokens: list[int | None] = []
        for chunk in plan.chunks:
            end = chunk.first_position + len(chunk.tokens)
            history = [self._cells[chunk.blocks[p // self.block_tokens], p % self.block_tokens] for p in range(end)]
            tokens.append(next_token(history) if chunk.sampling is not None else None)
        explains = [
            {"token": token} if chunk.explain else None for chunk, token in zip(plan.chunks, tokens, strict=True)
        ]
        return RunResult(tokens, explains, self.step_us)
