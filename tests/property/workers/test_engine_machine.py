"""Any interleaving of reserve, start, adopt, release, prove and step: outputs are the fake model's, nothing starves or
leaks.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.fake_model import VOCAB, FakeRunner, continue_text
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine, StepResult
from workers.engine.request import Request
from workers.protocol import SamplingParams, StreamKey

CONFIG = EngineConfig(block_tokens=4, num_blocks=14, chunk_tokens=6, max_running=5, max_context_tokens=40)


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
        self.runner = FakeRunner(CONFIG.block_tokens)
        self.engine = Engine(CONFIG, self.runner, lambda: self.now)
        self.live: dict[StreamKey, Expected] = {}
        self.quarantined: set[int] = set()
        self.count = 0

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 30), emitted=st.integers(0, 5), max_tokens=st.integers(1, 30), spare=st.integers(0, 2),
        holds=st.booleans(), stop=st.sets(st.integers(0, VOCAB - 1), max_size=6), keep=st.integers(0, 3),
    )  # fmt: skip
    def reserve(
        self, length: int, emitted: int, max_tokens: int, spare: int, holds: bool, stop: set[int], keep: int
    ) -> None:
        self.count += 1
        emitted = min(emitted, max_tokens - 1)
        known = [(7 * self.count + i) % VOCAB for i in range(length + emitted)]
        request = Request(
            key=StreamKey(self.count.to_bytes(16, "big"), 1), known=list(known), num_prompt=length, num_emitted=emitted,
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop)), hold_after_prompt=holds,
            arrival=self.now,
        )  # fmt: skip
        num_blocks = CONFIG.blocks_for(len(known)) + spare
        free, waits = self.engine.pool.num_free, self.engine.count("preempted")
        accepted = self.engine.reserve(request, num_blocks, keep)
        assert accepted == (not waits and self.engine.num_open - accepted < 5 and free >= num_blocks + keep)
        if accepted:
            self.live[request.key] = Expected(request, self._answer(request), emitted)
        else:
            assert (request.status, request.blocks, self.engine.pool.num_free) == ("new", [], free)

    @precondition(lambda self: self.of("reserved"))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.engine.start(data.draw(st.sampled_from(self.of("reserved"))))

    @precondition(lambda self: self.of("reserved"))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.of("reserved")))
        request = self.live[key].request
        self.runner.fill(request.blocks, request.known)
        self.engine.adopt(key, continue_text(request.known, 1)[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(key).request
        window = request.blocks if request.status == "reserved" else []
        written = [block for block in window if data.draw(st.booleans())]
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

    @rule()
    def step(self) -> None:
        had_work, plans = self.engine.has_work, len(self.runner.plans)
        result = self.engine.step()
        self.now += 0.01
        assert had_work or not (result.outputs or result.preempted or len(self.runner.plans) > plans)
        for plan in self.runner.plans[plans:]:
            assert sum(len(chunk.tokens) for chunk in plan.chunks if chunk.is_prompt) <= CONFIG.chunk_tokens
        self._check(result)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_whole(self) -> None:
        self.engine.check_integrity()
        assert self.engine.pool.num_quarantined == len(self.quarantined)

    def teardown(self) -> None:
        """Whatever happened, what is left finishes in bounded steps once transfers end, and every block comes back."""
        self.engine.prove(sorted(self.quarantined))
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
        assert self.engine.pool.num_free == CONFIG.num_blocks

    def of(self, status: str) -> list[StreamKey]:
        return sorted(key for key, expected in self.live.items() if expected.request.status == status)

    def _answer(self, request: Request) -> list[int]:
        limit = min(request.sampling.max_tokens - request.num_emitted, CONFIG.max_context_tokens - len(request.known))
        tokens = continue_text(request.known, 1 if request.hold_after_prompt else limit)
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


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
