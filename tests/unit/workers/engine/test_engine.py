"""The engine step by step with a fake model and a fake clock."""

import pytest

from tests.support.fake_model import FakeRunner, continue_text
from tests.support.fixed_costs import FixedCosts
from workers.engine.config import EngineConfig
from workers.engine.engine import Engine, Finished, Output, StepResult
from workers.engine.plan import StepPlan
from workers.engine.request import Request
from workers.protocol import ComputedPrompt, SamplingParams, StreamKey


class Rig:
    """An engine with everything around it faked."""

    def __init__(self, **config) -> None:
        settings = {"block_tokens": 4, "num_blocks": 16, "chunk_tokens": 8, "max_running": 8, "max_context_tokens": 64}
        self.config = EngineConfig(**{**settings, **config})
        self.runner = FakeRunner(self.config.block_tokens)
        self.now = 0.0
        self.engine = Engine(self.config, self.runner)

    def request(self, name: int, length: int, **fields) -> Request:
        defaults = {"sampling": SamplingParams(max_tokens=8), "arrival": self.now}
        known = [name * 10 + i for i in range(length)]
        num_emitted = fields.get("num_emitted", 0)
        fields.setdefault("num_prompt", length - num_emitted)
        return Request(**{"key": StreamKey(bytes([name]) * 16, 1), "known": known, **defaults, **fields})

    def begin(self, name: int, length: int, spare: int = 0, **fields) -> Request:
        request = self.request(name, length, **fields)
        assert self.engine.reserve(request, self.config.pages_for(length) + spare)
        self.engine.start(request.key)
        return request

    def steps(self, num: int = 1) -> StepResult:
        for _ in range(num):
            result = self.engine.step()
        return result

    @property
    def plan(self) -> StepPlan:
        return self.runner.plans[-1]

    def ran(self) -> list[tuple[int, int, bool]]:
        """(name, tokens, is_prompt) of each chunk of the last plan."""
        return [(chunk.key.stream[0], len(chunk.tokens), chunk.is_prompt) for chunk in self.plan.chunks]


def test_a_prompt_runs_in_chunks_and_then_decodes_to_its_length() -> None:
    rig = Rig()
    request = rig.begin(1, 19)
    outputs, finished = [], []
    while rig.engine.has_work:
        result = rig.engine.step()
        outputs += result.outputs
        finished += result.finished
    assert [len(plan.chunks[0].tokens) for plan in rig.runner.plans] == [8, 8, 3] + [1] * 7
    assert [plan.chunks[0].sampling is None for plan in rig.runner.plans] == [True, True] + [False] * 8
    expected = continue_text([10 + i for i in range(19)], 8)
    assert outputs == [Output(request.key, i, token) for i, token in enumerate(expected)]
    assert finished == [Finished(request.key, "length", 8)]
    assert rig.engine.get(request.key) is None
    assert rig.engine.pool.num_available == 16
    assert rig.engine.computed_prompt == ComputedPrompt(routine=19)


def test_a_stop_token_is_emitted_and_counted() -> None:
    rig = Rig()
    tokens = continue_text([10, 11, 12], 3)
    assert tokens[2] not in tokens[:2]
    request = rig.begin(1, 3, sampling=SamplingParams(max_tokens=8, stop_token_ids=(tokens[2],)))
    result = rig.steps(3)
    assert result.outputs == [Output(request.key, 2, tokens[2])]
    assert result.finished == [Finished(request.key, "stop", 3)]


def test_the_context_limit_ends_a_request() -> None:
    rig = Rig(max_context_tokens=5)
    request = rig.begin(1, 3)
    assert rig.steps(2).finished == [Finished(request.key, "length", 2)]


def test_a_resumed_request_counts_emitted_tokens() -> None:
    rig = Rig()
    request = rig.begin(1, 6, num_emitted=2, reason="resume", sampling=SamplingParams(max_tokens=3))
    result = rig.steps()
    assert rig.plan.chunks[0].output_position == 2
    assert [output.position for output in result.outputs] == [2]
    assert result.finished == [Finished(request.key, "length", 3)]
    assert rig.engine.computed_prompt == ComputedPrompt(resume=6)


def test_adopted_tokens_are_emitted_at_once_and_nothing_is_computed_as_prompt() -> None:
    rig = Rig()
    request = rig.request(1, 6)
    assert rig.engine.reserve(request, 3)
    assert not rig.engine.has_work
    rig.runner.fill(request.tables, request.known)
    tokens = continue_text(request.known, 8)
    rig.engine.adopt(request.key, tokens[0])
    assert rig.engine.has_work
    assert rig.steps().outputs == [Output(request.key, 0, tokens[0])]
    assert rig.runner.plans == []
    assert [rig.steps().outputs[0].token for _ in range(7)] == tokens[1:]
    assert rig.engine.computed_prompt == ComputedPrompt()
    assert not any(chunk.is_prompt for plan in rig.runner.plans for chunk in plan.chunks)


def test_an_adopted_token_may_end_the_request() -> None:
    rig = Rig()
    request = rig.request(1, 6, sampling=SamplingParams(max_tokens=8, stop_token_ids=(5,)))
    assert rig.engine.reserve(request, 2)
    rig.engine.adopt(request.key, 5)
    assert rig.steps().finished == [Finished(request.key, "stop", 1)]
    assert not rig.engine.has_work


def test_release_between_adopt_and_step_emits_nothing() -> None:
    rig = Rig()
    request = rig.request(1, 6)
    assert rig.engine.reserve(request, 2)
    rig.engine.adopt(request.key, 5)
    rig.engine.release(request.key)
    assert rig.steps() == StepResult()
    assert rig.engine.pool.num_available == 16


def test_prefill_holds_its_blocks_until_release() -> None:
    rig = Rig()
    request = rig.begin(1, 6, hold_after_prompt=True, sampling=SamplingParams(max_tokens=1))
    result = rig.steps()
    assert [output.token for output in result.outputs] == continue_text([10 + i for i in range(6)], 1)
    assert result.finished == []
    assert (request.status, len(request.tables[0]), rig.engine.has_work) == ("held", 2, False)
    assert rig.engine.num_open == 0
    rig.engine.release(request.key)
    assert rig.engine.pool.num_available == 16


def test_decodes_go_before_prompts_which_share_the_budget_shortest_first() -> None:
    rig = Rig()
    rig.begin(1, 3)
    rig.steps()
    rig.begin(2, 20)
    rig.begin(3, 5)
    rig.steps()
    assert rig.ran() == [(1, 1, False), (3, 5, True), (2, 3, True)]


def test_a_long_prompt_ages_past_a_stream_of_short_ones() -> None:
    rig = Rig(num_blocks=64, max_context_tokens=200, ageing_tokens_per_s=100.0, max_running=64)
    long = rig.begin(200, 40, hold_after_prompt=True)
    for name in range(60):
        short = rig.begin(name, 8, hold_after_prompt=True)
        rig.steps()
        rig.now += 0.1
        for request in (long, short):
            if request.status == "held":
                rig.engine.release(request.key)
        if long.status == "released":
            break
    assert long.status == "released"
    assert name >= 4, "the short ones go first"


def test_the_youngest_is_preempted_recomputed_and_finishes() -> None:
    rig = Rig(num_blocks=6, max_context_tokens=24)
    old = rig.begin(1, 8, sampling=SamplingParams(max_tokens=12))
    rig.now = 1.0
    young = rig.begin(2, 8, sampling=SamplingParams(max_tokens=12))
    tokens: dict[StreamKey, list[int]] = {old.key: [], young.key: []}
    preempted = []
    while rig.engine.has_work:
        result = rig.engine.step()
        preempted += result.preempted
        if result.preempted:
            assert not rig.engine.reserve(rig.request(3, 1), 1), "no new request before a preempted one"
        for output in result.outputs:
            tokens[output.key].append(output.token)
        rig.engine.check_integrity()
    assert set(preempted) == {young.key}
    for name, request in ((1, old), (2, young)):
        assert tokens[request.key] == continue_text([name * 10 + i for i in range(8)], 12)
    assert rig.engine.computed_prompt.preempt >= 8
    assert rig.engine.computed_prompt.routine == 16


def test_a_preempted_request_comes_back_only_with_room_for_the_others_next_step() -> None:
    rig = Rig(num_blocks=6, max_context_tokens=24)
    rig.begin(1, 8, sampling=SamplingParams(max_tokens=12))
    rig.now = 1.0
    rig.begin(2, 8, sampling=SamplingParams(max_tokens=12))
    preempted = 0
    while rig.engine.has_work:
        preempted += len(rig.engine.step().preempted)
    assert preempted == 1, "it was readmitted only to be preempted again"


def test_reserved_and_held_requests_are_never_preempted() -> None:
    rig = Rig(num_blocks=6, max_context_tokens=24, chunk_tokens=16)
    running = rig.begin(1, 8)
    rig.now = 1.0
    held = rig.begin(2, 4, hold_after_prompt=True)
    reserved = rig.request(3, 12)
    assert rig.engine.reserve(reserved, 3)
    rig.steps()
    assert held.status == "held"
    assert rig.steps().preempted == [running.key]
    assert (reserved.status, held.status) == ("reserved", "held")
    assert not rig.engine.has_work, "a step could do nothing"
    rig.engine.release(held.key)
    assert rig.engine.has_work
    rig.steps()
    assert running.status == "running"


def test_reserve_refuses_without_a_trace() -> None:
    rig = Rig(max_running=2, num_blocks=16)
    assert not rig.engine.reserve(rig.request(1, 4), 10, keep_free_blocks=7)
    assert rig.engine.reserve(rig.request(1, 4), 10, keep_free_blocks=6)
    assert not rig.engine.reserve(rig.request(2, 4), 7)
    assert rig.engine.reserve(rig.request(2, 4), 1)
    refused = rig.request(3, 4)
    assert not rig.engine.reserve(refused, 1), "max_running"
    assert (refused.status, rig.engine.pool.num_available) == ("new", 5)


@pytest.mark.parametrize(
    ("fields", "num_blocks", "message"),
    [
        ({"known": []}, 1, "0 known tokens are not"),
        ({"num_prompt": 0}, 1, "are not 0 prompt"),
        ({"known": [1] * 64, "num_prompt": 64}, 16, "leave no room"),
        ({"num_emitted": 2, "sampling": SamplingParams(max_tokens=2)}, 1, "already emitted"),
        ({}, 0, "0 blocks do not fit"),
        ({}, 17, "17 blocks do not fit"),
    ],
)
def test_reserve_rejects_what_can_never_be_served(fields: dict, num_blocks: int, message: str) -> None:
    rig = Rig()
    with pytest.raises(ValueError, match=message):
        rig.engine.reserve(rig.request(1, 4, **fields), num_blocks)
    assert rig.engine.pool.num_available == 16


def test_a_key_cannot_be_reserved_twice() -> None:
    rig = Rig()
    rig.begin(1, 4)
    with pytest.raises(ValueError, match="already here"):
        rig.engine.reserve(rig.request(1, 4), 1)


def test_quarantined_blocks_wait_for_their_proof() -> None:
    rig = Rig()
    request = rig.request(1, 8)
    assert rig.engine.reserve(request, 2)
    written = request.tables[0][:1]
    rig.engine.release(request.key, written)
    rig.engine.release(request.key)
    assert (rig.engine.pool.num_available, rig.engine.pool.num_quarantined) == (15, 1)
    with pytest.raises(AssertionError, match="too late"):
        rig.engine.release(request.key, written)
    rig.engine.prove(written)
    assert rig.engine.pool.num_available == 16


def test_only_the_first_token_is_explained() -> None:
    rig = Rig()
    request = rig.begin(1, 12, explain=True)
    assert rig.steps().explains == []
    assert [key for key, _ in rig.steps().explains] == [request.key]
    assert rig.steps().explains == []


def test_queued_tokens_count_what_is_left_to_compute() -> None:
    rig = Rig()
    rig.begin(1, 20)
    assert rig.engine.queued_tokens == 20
    rig.steps()
    assert rig.engine.queued_tokens == 12
    rig.steps(2)
    assert rig.engine.queued_tokens == 0


def test_the_observer_sees_a_step_from_inside() -> None:
    rig = Rig()
    seen: list[object] = []

    class Observer:
        def planned(self, plan: StepPlan) -> None:
            seen.append(("planned", plan.num_tokens))

        def layer_done(self, plan: StepPlan, layer: int) -> None:
            seen.append(layer)

        def computed(self, plan: StepPlan) -> None:
            seen.append("computed")

    rig.engine.observer = Observer()
    rig.begin(1, 6)
    rig.steps()
    assert seen == [("planned", 6), 0, 1, "computed"]


def test_requests_run_in_order_of_arrival_whatever_the_order_of_reservation() -> None:
    rig = Rig()
    for name, arrival in ((1, 5.0), (2, 3.0), (3, 4.0)):
        rig.begin(name, 2, arrival=arrival)
    rig.steps(2)
    assert [name for name, _, _ in rig.ran()] == [2, 3, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tokens", 0), ("num_blocks", 0), ("chunk_tokens", 0), ("max_running", 0), ("max_context_tokens", 1),
        ("max_context_tokens", 65), ("ageing_tokens_per_s", 0.0),
    ],
)  # fmt: skip
def test_config_refuses_contradictions(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field.removesuffix("_per_s")):
        Rig(**{field: value})


# --- cached prefixes ----------------------------------------------------------------------------------------------


def drain(rig: Rig) -> dict[StreamKey, list[int]]:
    tokens: dict[StreamKey, list[int]] = {}
    while rig.engine.has_work:
        for output in rig.steps().outputs:
            tokens.setdefault(output.key, []).append(output.token)
        rig.engine.check_integrity()
    return tokens


def test_a_second_request_computes_only_what_differs() -> None:
    rig = Rig()
    drain_first = rig.begin(1, 19)
    drain(rig)
    rig.runner.plans.clear()
    text = [10 + i for i in range(14)] + [99, 98, 97]
    request = rig.begin(2, 17, known=list(text))
    assert (request.num_cached, request.computed) == (12, 12)
    assert drain(rig)[request.key] == continue_text(text, 8)
    assert rig.runner.plans[0].chunks[0].first_position == 12
    assert rig.engine.computed_prompt == ComputedPrompt(routine=19 + 5)
    assert drain_first.status == "finished"


def test_the_last_token_always_runs() -> None:
    rig = Rig()
    rig.begin(1, 8)
    drain(rig)
    request = rig.begin(2, 8, known=[10 + i for i in range(8)])
    assert request.num_cached == 4
    assert drain(rig)[request.key] == continue_text([10 + i for i in range(8)], 8)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    rig = Rig()
    first = rig.begin(1, 6)
    answer = drain(rig)[first.key]
    turn = [10 + i for i in range(6)] + answer + [5, 6]
    request = rig.begin(2, len(turn), known=list(turn))
    assert request.num_cached == 12, "the KV of the last answered token was never computed"
    assert drain(rig)[request.key] == continue_text(turn, 8)


def test_a_running_request_s_blocks_are_shared_and_outlive_it() -> None:
    rig = Rig(num_blocks=9, max_context_tokens=36)
    first = rig.begin(1, 12)
    rig.steps(2)
    second = rig.begin(2, 12, known=[10 + i for i in range(12)])
    assert second.tables[0][:2] == first.tables[0][:2]
    rig.engine.release(first.key)
    assert drain(rig)[second.key] == continue_text([10 + i for i in range(12)], 8)


def test_a_block_is_found_only_once_it_is_final() -> None:
    rig = Rig(chunk_tokens=6)
    rig.begin(1, 20)
    other = rig.request(2, 20, known=[10 + i for i in range(20)])
    assert rig.engine.find_prefix(other) == 0
    rig.steps()
    assert rig.engine.find_prefix(other) == 4
    rig.steps(2)
    assert rig.engine.find_prefix(other) == 16


def test_kv_that_was_expected_is_found_after_its_adoption_and_not_before() -> None:
    rig = Rig()
    first = rig.request(1, 10)
    assert rig.engine.reserve(first, 4)
    other = rig.request(2, 10, known=list(first.known))
    assert rig.engine.find_prefix(other) == 0
    rig.runner.fill(first.tables, first.known)
    rig.engine.adopt(first.key, continue_text(first.known, 1)[0])
    assert rig.engine.find_prefix(other) == 8
    revoked = rig.request(3, 10)
    assert rig.engine.reserve(revoked, 3)
    rig.engine.release(revoked.key, revoked.tables[0][:1])
    assert rig.engine.find_prefix(rig.request(4, 10, known=list(revoked.known))) == 0


def test_tenants_share_nothing_and_a_switch_turns_it_off() -> None:
    rig, off = Rig(), Rig(prefix_cache=False)
    for each in (rig, off):
        each.begin(1, 12, tenant=b"a")
        drain(each)
    same = [10 + i for i in range(12)]
    assert rig.begin(2, 12, known=list(same), tenant=b"b").num_cached == 0
    assert rig.begin(3, 12, known=list(same), tenant=b"a").num_cached == 8
    assert off.begin(3, 12, known=list(same), tenant=b"a").num_cached == 0
    assert off.engine.pool.num_cached == 0


def test_a_preempted_request_comes_back_to_what_it_had_computed() -> None:
    recomputed = []
    for prefix_cache in (True, False):
        rig = Rig(num_blocks=7, max_context_tokens=28, prefix_cache=prefix_cache)
        sampling = SamplingParams(max_tokens=14)
        old = rig.begin(1, 8, sampling=sampling)
        rig.now = 1.0
        young = rig.begin(2, 8, sampling=sampling)
        tokens = drain(rig)
        assert tokens[young.key] == continue_text([20 + i for i in range(8)], 14)
        assert tokens[old.key] == continue_text([10 + i for i in range(8)], 14)
        recomputed.append(rig.engine.computed_prompt.preempt)
    assert 0 < recomputed[0] < recomputed[1]


def test_the_pool_is_used_up_before_anything_is_forgotten_and_the_oldest_goes_first() -> None:
    rig = Rig(num_blocks=8, max_context_tokens=32)
    for name in (1, 2, 3):
        rig.begin(name, 9, sampling=SamplingParams(max_tokens=1))
        drain(rig)
    found = [rig.engine.find_prefix(rig.request(name, 9)) for name in (1, 2, 3)]
    assert found == [8, 8, 8]
    rig.begin(4, 13, sampling=SamplingParams(max_tokens=1))
    drain(rig)
    assert [rig.engine.find_prefix(rig.request(name, 9)) for name in (1, 2, 3, 4)] == [0, 8, 8, 8]


# --- priorities and budgets ---------------------------------------------------------------------------------------


def test_the_lowest_priority_is_preempted_then_the_youngest() -> None:
    rig = Rig(num_blocks=6, max_context_tokens=24)
    low = rig.begin(1, 8, priority=-1)
    rig.now = 1.0
    high = rig.begin(2, 8, priority=1)
    rig.now = 2.0
    rig.begin(3, 4)
    preempted = []
    for _ in range(8):
        preempted += rig.steps().preempted
    assert preempted[0] == low.key
    assert high.status in ("running", "finished")


def test_prompts_of_higher_priority_go_first_until_the_others_have_waited_long_enough() -> None:
    rig = Rig(num_blocks=64, max_context_tokens=200, chunk_tokens=4, ageing_tokens_per_s=10.0)
    rig.begin(1, 8)
    long = rig.begin(2, 40, priority=1)
    rig.steps()
    assert rig.ran()[0][0] == 2, "longer by 32 tokens, and ahead by a level's 80"
    rig.engine.release(long.key)
    rig.now = 60.0
    rig.begin(3, 8, priority=1)
    rig.steps()
    assert rig.ran()[0][0] == 1, "52 s more of waiting are worth 520 tokens"


def test_a_budget_in_milliseconds_bounds_the_prompt_tokens_of_a_step() -> None:
    rig = Rig(num_blocks=64, max_context_tokens=200, chunk_tokens=100, step_budget_ms=12.0, min_chunk_tokens=3)
    costs = FixedCosts()
    rig.engine = Engine(rig.config, rig.runner, costs=costs)
    rig.runner.step_us = 7000
    for name in range(5):
        rig.begin(name, 1)
    rig.steps()
    rig.begin(7, 30)
    rig.begin(8, 5)
    rig.steps()
    assert rig.ran()[5:] == [(8, 5, True), (7, 2, True)]
    assert costs.seen == (5, 7, 7.0)


def test_a_step_without_budget_left_still_moves_one_prompt_on() -> None:
    rig = Rig(num_blocks=64, max_context_tokens=200, chunk_tokens=100, step_budget_ms=0.5, min_chunk_tokens=3)
    rig.engine = Engine(rig.config, rig.runner, costs=FixedCosts())
    rig.begin(7, 30)
    rig.begin(8, 5)
    rig.steps()
    assert rig.ran() == [(8, 3, True)]
    rig.steps()
    assert rig.ran() == [(8, 2, True)]


# --- nobody starves -----------------------------------------------------------------------------------------------


def test_a_long_prompt_of_low_priority_is_computed_under_a_stream_of_urgent_short_ones() -> None:
    rig = Rig(num_blocks=64, max_context_tokens=200, max_running=64, ageing_tokens_per_s=100.0)
    low = rig.begin(200, 40, hold_after_prompt=True, priority=-1)
    for count in range(1000):
        urgent = rig.begin(count % 199, 8, hold_after_prompt=True, priority=1, tenant=count.to_bytes(2, "big"))
        rig.steps()
        rig.now += 0.1
        for request in (low, urgent):
            if request.status == "held":
                rig.engine.release(request.key)
        if low.status == "released":
            break
        if urgent.status != "released":
            rig.engine.release(urgent.key)
    assert low.status == "released"
    assert 16.0 <= rig.now <= 18.0, "two levels of 8 s, then it goes first"


def test_a_preempted_request_of_low_priority_finishes_under_a_stream_of_urgent_ones() -> None:
    rig = Rig(num_blocks=8, max_context_tokens=32, max_running=3)
    low = rig.begin(200, 8, priority=-1, sampling=SamplingParams(max_tokens=20))
    preempted, tokens = 0, list[int]()
    for count in range(3000):
        urgent = rig.request(count % 199, 8, priority=1, sampling=SamplingParams(max_tokens=12))
        if rig.engine.get(urgent.key) is None and rig.engine.reserve(urgent, 2):
            rig.engine.start(urgent.key)
        result = rig.steps()
        rig.now += 0.05
        preempted += result.preempted.count(low.key)
        tokens += [output.token for output in result.outputs if output.key == low.key]
        if low.status == "finished":
            break
    assert tokens == continue_text([2000 + i for i in range(8)], 20)
    assert preempted > 0
    assert rig.now < 30.0
