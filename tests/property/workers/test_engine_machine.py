"""Any interleaving of reserve, start, adopt, release, prove and step, over texts that begin alike: outputs are the fake
model's whatever was cached, evicted or preempted; nothing is written while shared, starves or leaks; budgets are kept.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.layout import NULL_BLOCK
from tests.support.fake_model import VOCAB, FakeRunner, continue_text
from tests.support.state_machines import run_steps
from workers.engine.config import EngineConfig
from workers.engine.cost import BrokenLine, CostTable, MeasuredCosts, StepShape
from workers.engine.engine import Engine, StepResult
from workers.engine.plan import StepPlan
from workers.engine.request import Request
from workers.protocol import SamplingParams, StreamKey

BUDGET_MS = 8.0
CONFIG = EngineConfig(
    block_tokens=4, num_blocks=14, chunk_tokens=6, max_running=5, max_context_tokens=40, min_chunk_tokens=2,
    step_budget_ms=BUDGET_MS,
)  # fmt: skip
COSTS = CostTable(
    decodes=BrokenLine(((1, 1.0),)), prompt=BrokenLine(((1, 1.0),)), ms_per_decode_context=0.0, ms_per_pair=0.02
)
TEXTS = [[(n * i) % VOCAB for i in range(40)] for n in (1, 2, 1 << 9)]


@dataclass
class Expected:
    """What one live request must emit, and what it has."""

    request: Request
    tokens: list[int]
    start: int
    emitted: list[int] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.open(CONFIG)
        self.live: dict[StreamKey, Expected] = {}
        self.quarantined: set[int] = set()
        self.count = 0

    def open(self, config: EngineConfig) -> None:
        self.config = config
        self.runner = FakeRunner(config.block_tokens, windows=config.windows)
        self.costs = MeasuredCosts(COSTS)
        self.engine = Engine(config, self.runner, costs=self.costs)

    @property
    def window(self) -> int | None:
        """What a token sees of its text: the most that any group shows it."""
        windows = [window for window in self.config.windows if window is not None]
        return max(windows) if len(windows) == len(self.config.windows) else None

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 30), emitted=st.integers(0, 5), max_tokens=st.integers(1, 30), spare=st.integers(0, 2),
        way=st.sampled_from(["", "", "holds", "adopts"]), stop=st.sets(st.integers(0, VOCAB - 1), max_size=6),
        keep=st.integers(0, 3), text=st.sampled_from(TEXTS), fork=st.integers(0, 60),
        standing=st.tuples(st.booleans(), st.integers(-2, 2)),
    )  # fmt: skip
    def reserve(
        self, length: int, emitted: int, max_tokens: int, spare: int, way: str, stop: set[int], keep: int,
        text: list[int], fork: int, standing: tuple[bool, int],
    ) -> None:  # fmt: skip
        self.count += 1
        emitted = min(emitted, max_tokens - 1)
        known = [*text[:fork], *((7 * self.count + i) % VOCAB for i in range(40))][: length + emitted]
        request = Request(
            key=StreamKey(self.count.to_bytes(16, "big"), 1), known=list(known), num_prompt=length, num_emitted=emitted,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop)),
            hold_after_prompt=way == "holds", adopts=way == "adopts", arrival=self.now, tenant=b"a" * standing[0],
            priority=standing[1],
        )  # fmt: skip
        num_pages, pool = self.config.pages_for(len(known)) + spare, self.engine.pool
        found = self.engine.find_prefix(request) // 4
        free, waits, cached = pool.num_available, self.engine.count("preempted"), pool.num_cached
        has_room = self.has_room(request, num_pages, found, keep)
        accepted = self.engine.reserve(request, num_pages, keep)
        assert accepted == (not waits and self.engine.num_open - accepted < 5 and has_room)
        if accepted:
            assert request.computed == request.num_cached == 4 * found < len(known)
            self.live[request.key] = Expected(request, self._answer(request), emitted)
        else:
            assert (request.status, request.tables, pool.num_available) == ("new", [], free)
            assert pool.num_cached == cached

    def has_room(self, request: Request, num_pages: int, found: int, keep: int) -> bool:
        """What the pool must have for one group without a window."""
        pool = self.engine.pool
        held = pool.count_unreferenced(self.engine.prefixes.tables(request.names, found)[0])
        return pool.num_available - held >= num_pages - found + keep

    @precondition(lambda self: self.of("reserved", adopts=False))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.engine.start(data.draw(st.sampled_from(self.of("reserved", adopts=False))))

    @precondition(lambda self: self.of("reserved", adopts=True))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        self.arrive(data.draw(st.sampled_from(self.of("reserved", adopts=True))))

    def arrive(self, key: StreamKey) -> None:
        request = self.live[key].request
        self.runner.fill(request.tables, request.known, request.computed)
        self.engine.adopt(key, continue_text(request.known, 1, self.window)[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(key).request
        own = [block for table in request.tables for block in table[request.computed // 4 :] if block != NULL_BLOCK]
        written = [block for block in own if request.status == "reserved" and data.draw(st.booleans())]
        self.engine.release(key, written)
        self.engine.release(key)
        self.quarantined |= set(written)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        for block in sorted(self.quarantined):
            self.runner.scribble(block)
        proven = [block for block in sorted(self.quarantined) if data.draw(st.booleans())]
        self.engine.prove(proven)
        self.quarantined -= set(proven)

    @rule(num=st.integers(1, 12))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.step()

    def step(self) -> None:
        had_work, plans = self.engine.has_work, len(self.runner.plans)
        costs = MeasuredCosts(COSTS)
        costs.decode_factor, costs.prompt_factor = self.costs.decode_factor, self.costs.prompt_factor
        result = self.engine.step()
        self.now += 0.01
        assert had_work or not (result.outputs or result.preempted or len(self.runner.plans) > plans)
        for plan in self.runner.plans[plans:]:
            self._check_budget(plan, costs)
        self._check(result)

    @rule(ms=st.floats(0.1, 100))
    def the_machine_changes(self, ms: float) -> None:
        """Its steps become slower or faster; what they cost is learned."""
        self.runner.step_us = int(ms * 1000)

    def _check_budget(self, plan: StepPlan, costs: MeasuredCosts) -> None:
        """A step keeps the token budget, and that of milliseconds by the costs it was planned with, or moves little."""
        shape, prompts = StepShape(), [chunk for chunk in plan.chunks if chunk.is_prompt]
        for chunk in plan.chunks:
            if chunk.is_prompt:
                shape.add_prompt(len(chunk.tokens), chunk.first_position)
            else:
                shape.add_decode(chunk.first_position)
        assert shape.prompt_tokens <= self.config.chunk_tokens
        is_least = len(prompts) == 1 and shape.prompt_tokens <= self.config.min_chunk_tokens
        assert not prompts or is_least or costs.predict(shape) <= BUDGET_MS + 1e-9

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_whole(self) -> None:
        self.engine.check_integrity()
        pool = self.engine.pool
        assert pool.num_quarantined == len(self.quarantined)
        assert pool.num_free + pool.num_used + pool.num_cached + pool.num_quarantined == self.config.num_blocks

    def teardown(self) -> None:
        """Whatever happened, what is left finishes in bounded steps once transfers end, and every block comes back."""
        self.engine.prove(sorted(self.quarantined))
        for key in self.of("reserved", adopts=True):
            self.arrive(key)
        for key in self.of("reserved"):
            self.engine.start(key)
        bound = 40 * sum(len(e.tokens) + len(e.request.known) for e in self.live.values()) + 10
        for _ in range(bound):
            if not self.engine.has_work and not self.of("held"):
                break
            for key in self.of("held"):
                self.engine.release(key)
                del self.live[key]
            self._check(self.engine.step())
            self.now += 0.01
        assert self.live == {}, "a request starved"
        assert self.engine.pool.num_available == self.engine.num_available_blocks == self.config.num_blocks

    def of(self, status: str, adopts: bool | None = None) -> list[StreamKey]:
        found = ((key, expected.request) for key, expected in self.live.items())
        return sorted(key for key, r in found if r.status == status and adopts in (None, r.adopts))

    def _answer(self, request: Request) -> list[int]:
        limit = min(
            request.sampling.max_tokens - request.num_emitted, self.config.max_context_tokens - len(request.known)
        )
        tokens = continue_text(request.known, 1 if request.hold_after_prompt else limit, self.window)
        stops = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens

    def _check(self, result: StepResult) -> None:
        for output in result.outputs:
            expected = self.live[output.key]
            assert output.position == expected.start + len(expected.emitted)
            expected.emitted.append(output.token)
            assert expected.emitted == expected.tokens[: len(expected.emitted)]
            if expected.request.hold_after_prompt:
                assert expected.request.status == "held"
        for finished in result.finished:
            expected = self.live.pop(finished.key)
            assert expected.emitted == expected.tokens
            assert finished.count == expected.start + len(expected.tokens)
            is_stop = expected.tokens[-1] in expected.request.sampling.stop_token_ids
            assert finished.reason == ("stop" if is_stop else "length")


@pytest.mark.timeout(1800)
def test_engine(is_full: bool) -> None:
    run_steps(EngineMachine, is_full, 60)
