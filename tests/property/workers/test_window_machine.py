"""The engine over state groups with any windows: outputs are those of a model that sees through them, so no page that a
token still sees was ever let go; what slid out was; a prompt and a stream go on whatever others hold.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kv_transfer.layout import NULL_BLOCK
from tests.property.workers.test_engine_machine import BUDGET_MS, CONFIG, EngineMachine
from tests.support.state_machines import run_steps
from workers.engine.config import EngineConfig
from workers.engine.request import Request
from workers.pages import blocks_to_hold, first_page_seen, most_pages


class WindowMachine(EngineMachine):
    @initialize(
        windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4).filter(any),
        chunk_tokens=st.integers(1, 9),
        spare=st.integers(0, 6),
    )
    def choose(self, windows: list[int | None], chunk_tokens: int, spare: int) -> None:
        pages = CONFIG.pages_for(CONFIG.max_context_tokens) + 2
        self.open(
            EngineConfig(
                block_tokens=4, num_blocks=blocks_to_hold(pages, windows, 4, chunk_tokens) + spare,
                chunk_tokens=chunk_tokens, max_running=5, max_context_tokens=40, min_chunk_tokens=2,
                step_budget_ms=BUDGET_MS, windows=tuple(windows),
            )
        )  # fmt: skip

    def has_room(self, request: Request, num_pages: int, found: int, keep: int) -> bool:
        """Every promise that was made can be kept, and this one, too."""
        pool, windows = self.engine.pool, self.config.windows
        tables = self.engine.prefixes.tables(request.names, found)
        whole = [group for group, window in enumerate(windows) if window is None]
        unheld = len(whole) * (num_pages - found) + sum(pool.count_unreferenced(tables[group]) for group in whole)
        others = sum(expected.request.num_promised for expected in self.live.values())
        used = {b for e in self.live.values() for g, t in enumerate(e.request.tables) if g not in whole for b in t}
        seen_from = len(request.known) if request.adopts else 4 * found
        at_once = 1 if request.adopts or seen_from >= len(request.known) - 1 else self.config.chunk_tokens
        promise = sum(
            min(num_pages - first_page_seen(seen_from, window, 4), most_pages(window, at_once, 4))
            for window in windows if window is not None
        )  # fmt: skip
        available = pool.num_available + len(used - {NULL_BLOCK}) - others
        return available >= unheld + promise + keep

    @invariant()
    def windows_bound_what_is_held(self) -> None:
        for expected in self.live.values():
            for table, window in zip(expected.request.tables, self.config.windows, strict=False):
                held = sum(block != NULL_BLOCK for block in table)
                assert window is None or held <= most_pages(window, self.config.chunk_tokens, 4)


@pytest.mark.timeout(1800)
def test_windows(is_full: bool) -> None:
    run_steps(WindowMachine, is_full, 60)
