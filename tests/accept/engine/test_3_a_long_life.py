"""Line 3: one engine lives through 100,000 steps of requests that arrive, share prefixes, are held, adopted, hung up on
and preempted, and nothing starves, leaks or is written while shared. The slice takes 5,000 steps.

What is checked at each step is the state machine's of tests/property/workers, whose stories are short; 100,000 steps of
each of those machines are part of `make accept-engine`, too.
"""

import random
from collections.abc import Sequence

import pytest

from kv_transfer.layout import NULL_BLOCK
from tests.property.workers.test_engine_machine import CONFIG, TEXTS, EngineMachine
from tests.property.workers.test_window_machine import WindowMachine
from tests.support.fake_model import VOCAB
from workers.engine.plan import Chunk
from workers.protocol import PRIORITY_S, StreamKey

FULL_STEPS, SLICE_STEPS = 100_000, 5_000
STEP_S = 0.5
"""What a step takes by the engine's clock: arrivals so far apart let every rank of priority be outwaited."""
MOST_WAITING = int(4 * PRIORITY_S / STEP_S) + 4 * (CONFIG.max_context_tokens + 20)
"""Steps without progress: until nobody who comes later ranks before it, and then until the four others that may be open
have computed their prompts, two tokens a step at least, and all their tokens. The longest wait seen was 67 steps."""
WINDOWS: dict[str, tuple[int | None, ...]] = {"one group": (None,), "two windows": (None, 9, 5), "windows only": (7,)}


class Life:
    """An engine under the machine's checks, driven by dice."""

    def __init__(self, windows: tuple[int | None, ...], seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine = WindowMachine() if any(windows) else EngineMachine()
        if isinstance(self.machine, WindowMachine):
            self.machine.choose(windows=list(windows), chunk_tokens=6, spare=2)
        self.waiting: dict[StreamKey, int] = {}
        self.num_steps = self.num_preempted = self.num_hits = self.longest_wait = 0

    def arrive(self) -> None:
        dice, before = self.dice, set(self.machine.live)
        stop = set(dice.sample(range(VOCAB), dice.randrange(4)))
        self.machine.reserve(
            length=dice.randint(1, 30), emitted=dice.choice((0, 0, 0, 3)), max_tokens=dice.randint(1, 30),
            spare=dice.randrange(2), way=dice.choice(("", "", "holds", "adopts")), stop=stop, keep=dice.randrange(3),
            text=dice.choice(TEXTS), fork=dice.randrange(40), standing=(dice.random() < 0.3, dice.randint(-2, 2)),
        )  # fmt: skip
        for key in set(self.machine.live) - before:
            self.num_hits += self.machine.live[key].request.num_cached > 0

    def begin(self) -> None:
        """What was reserved is computed here, or its KV arrives, or its client hangs up while it is being written."""
        for key in self.machine.of("reserved"):
            request = self.machine.live[key].request
            if self.dice.random() < 0.1:
                self.hang_up(key, is_written=request.adopts)
            elif request.adopts:
                self.machine.arrive(key)
            else:
                self.machine.engine.start(key)

    def hang_up(self, key: StreamKey, *, is_written: bool = False) -> None:
        request = self.machine.live.pop(key).request
        own = [block for table in request.tables for block in table[request.computed // 4 :] if block != NULL_BLOCK]
        written = [block for block in own if is_written and self.dice.random() < 0.7]
        self.machine.engine.release(key, written)
        self.machine.quarantined |= set(written)

    def prove(self) -> None:
        quarantined = sorted(self.machine.quarantined)
        for block in quarantined:
            self.machine.runner.scribble(block)
        self.machine.engine.prove(quarantined)
        self.machine.quarantined.clear()

    def step(self) -> None:
        self.machine.runner.plans.clear()
        before = {key: (e.request.computed, len(e.emitted)) for key, e in self.machine.live.items()}
        self.machine.step()
        self.machine.now += STEP_S
        self.machine.blocks_are_whole()
        if isinstance(self.machine, WindowMachine):
            self.machine.windows_bound_what_is_held()
        for plan in self.machine.runner.plans:
            check_writes(plan.chunks)
        self.check_waiting(before)
        self.num_steps += 1

    def check_waiting(self, before: dict[StreamKey, tuple[int, int]]) -> None:
        now = {}
        for key, expected in self.machine.live.items():
            request = expected.request
            if request.status not in ("running", "preempted"):
                continue
            self.num_preempted += request.status == "preempted" and key in self.waiting and not self.waiting[key]
            has_moved = before.get(key) != (request.computed, len(expected.emitted))
            now[key] = 0 if has_moved else self.waiting.get(key, 0) + 1
            self.longest_wait = max(self.longest_wait, now[key])
            assert now[key] <= MOST_WAITING, f"{key!r} starves: {request.story}"
        self.waiting = now


def check_writes(chunks: Sequence[Chunk]) -> None:
    """No block is written by two requests, nor written by one and read by another."""
    written: dict[int, StreamKey] = {}
    for chunk in chunks:
        end = chunk.first_position + len(chunk.tokens)
        for table in chunk.tables:
            for block in table[chunk.first_position // 4 : -(-end // 4)]:
                assert block not in written, "two write into a block"
                written[block] = chunk.key
    for chunk in chunks:
        for table in chunk.tables:
            assert all(written.get(block, chunk.key) == chunk.key for block in table), "read while written"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("windows", WINDOWS)
def test_nothing_starves_leaks_or_is_written_while_shared(windows: str, is_full: bool) -> None:
    life = Life(WINDOWS[windows], seed=20261201)
    wanted = FULL_STEPS if is_full else SLICE_STEPS
    while life.num_steps < wanted:
        busy = life.dice.random() < 0.9
        for _ in range(life.dice.randrange(3) if busy else 0):
            life.arrive()
        life.begin()
        for key in life.machine.of("held"):
            if life.dice.random() < 0.3:
                life.hang_up(key)
        if life.machine.live and life.dice.random() < 0.02:
            life.hang_up(life.dice.choice(sorted(life.machine.live)))
        if life.dice.random() < 0.1:
            life.prove()
        if life.dice.random() < 0.02:
            life.machine.the_machine_changes(life.dice.uniform(0.1, 50.0))
        life.step()
    life.machine.teardown()
    print(
        f"{life.num_steps} steps: {life.machine.count} requests offered, {life.num_hits} hits, {life.num_preempted} "
        f"preemptions, longest wait {life.longest_wait} steps of at most {MOST_WAITING}"
    )
    assert life.num_steps >= wanted
    assert min(life.num_hits, life.num_preempted) > wanted / 200
