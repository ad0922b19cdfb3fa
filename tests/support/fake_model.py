"""A runner without a model: it keeps token ids where the KV cache would be, and reads them back through block tables.

The next token is a hash of everything the block table shows, so a wrong block, a block given to two requests or a token
computed at a wrong place changes the output.
"""

import zlib
from array import array
from collections.abc import Callable, Sequence

from kv_transfer.layout import NULL_BLOCK
from workers.engine.plan import Chunk, RunResult, StepPlan

VOCAB = 97


def next_token(history: Sequence[int]) -> int:
    """What the fake model answers after `history`."""
    return zlib.crc32(array("q", history).tobytes()) % VOCAB


def continue_text(known: Sequence[int], num_tokens: int, window: int | None = None) -> list[int]:
    """The next `num_tokens` tokens after `known`, one after the other, each of what a token sees."""
    history = list(known)
    for _ in range(num_tokens):
        history.append(next_token(history if window is None else history[-window:]))
    return history[len(known) :]


class FakeRunner:
    """An `engine.plan.Runner`; `plans` keeps what it was given. Looks through the table of the group that sees the
    most, and holds the others against it."""

    def __init__(self, block_tokens: int, num_layers: int = 2, windows: Sequence[int | None] = (None,)) -> None:
        self.block_tokens = block_tokens
        self.windows = windows
        self.num_layers = num_layers
        self.plans: list[StepPlan] = []
        self.step_us = 1
        """What each step is said to have taken."""
        self._cells: dict[tuple[int, int], int] = {}

    def fill(self, tables: Sequence[Sequence[int]], tokens: Sequence[int], skip_tokens: int = 0) -> None:
        """What a transfer does: the cache of `tokens` from `skip_tokens` on appears where there are blocks."""
        for table in tables:
            for position, token in list(enumerate(tokens))[skip_tokens:]:
                page, slot = divmod(position, self.block_tokens)
                if table[page] != NULL_BLOCK:
                    self._cells[table[page], slot] = token

    def scribble(self, block: int) -> None:
        """A late write of a transfer into a block that it may still hold."""
        for slot in range(self.block_tokens):
            self._cells[block, slot] = -1

    def execute(self, plan: StepPlan, on_layer: Callable[[int], None]) -> RunResult:
        assert plan.chunks
        assert len({chunk.key for chunk in plan.chunks}) == len(plan.chunks), "a request is twice in the plan"
        self.plans.append(plan)
        for chunk in plan.chunks:
            for table in chunk.tables:
                for offset, token in enumerate(chunk.tokens):
                    page, slot = divmod(chunk.first_position + offset, self.block_tokens)
                    assert table[page] != NULL_BLOCK, "a token has no place"
                    self._cells[table[page], slot] = token
        for layer in range(self.num_layers):
            on_layer(layer)
        tokens: list[int | None] = []
        for chunk in plan.chunks:
            history = self._look(chunk)
            tokens.append(next_token(history) if chunk.sampling is not None else None)
        explains = [
            {"token": token} if chunk.explain else None for chunk, token in zip(plan.chunks, tokens, strict=True)
        ]
        return RunResult(tokens, explains, self.step_us)

    def _look(self, chunk: Chunk) -> list[int]:
        """What the last token of the chunk sees."""
        first, end = chunk.first_position, chunk.first_position + len(chunk.tokens)
        views = []
        for table, window in zip(chunk.tables, self.windows, strict=True):
            start = 0 if window is None else max(0, first - window + 1)
            places = [(table[p // self.block_tokens], p % self.block_tokens) for p in range(start, end)]
            seen = [self._cells[place] for place in places]
            views.append(seen)
            if window is not None and end - start > window:
                del views[-1][: end - start - window]
        longest = max(views, key=len)
        assert all(view == longest[len(longest) - len(view) :] for view in views), "groups disagree"
        return longest
