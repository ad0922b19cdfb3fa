"""The pure decisions: routes, admission, retries, the order of the queue."""

import dataclasses
from dataclasses import dataclass

import pytest

from router.admission import ArrivalQueue, Door, decide_admission
from router.errors import ApiError
from router.retry import Budgets, Failure, Retry, Situation, Spent, decide_retry
from router.status import find_missing
from router.worker_view import Dispatched, Need, Route, Wait, WorkerSnapshot, decide_route, pool_tokens
from workers.protocol import ComputedPrompt, Load, Role, WorkerIdentity, WorkerState


def worker(
    incarnation: int,
    role: Role,
    *,
    free: int = 100,
    queued: int = 0,
    state: WorkerState = "ready",
    lanes: tuple[int, ...] = (1, 2),
    last_dispatch: int = 0,
) -> WorkerSnapshot:
    identity = WorkerIdentity(incarnation, role, "m", "d", 1, 1, 16, 100, 1600, 4, 1)
    load = Load(state, last_dispatch, 100, free, 0, 0, 0, queued, 0, lanes, ComputedPrompt())
    return WorkerSnapshot(incarnation, role, identity, load, True, False, False)


def route(workers: list[WorkerSnapshot], need: Need = Need(32, 100), mode: str = "always", draw: float = 0.0):  # noqa: B008  # frozen
    return decide_route(workers, need, mode, lambda: draw)  # type: ignore[arg-type]


def test_the_least_loaded_pair_is_taken() -> None:
    workers = [
        worker(1, "prefill", queued=500),
        worker(2, "prefill"),
        worker(3, "decode", free=50),
        worker(4, "decode"),
    ]
    chosen = route(workers)
    assert isinstance(chosen, Route)
    assert (chosen.prefill, chosen.decode, chosen.local) == (2, 4, "none")
    assert chosen.blocks == 2 + 4
    assert isinstance(second := route(workers, draw=0.99), Route)
    assert (second.prefill, second.decode) == (1, 3)


@pytest.mark.parametrize(
    ("workers", "label"),
    [
        ([], "no_decode_worker"),
        ([worker(1, "prefill")], "no_decode_worker"),
        ([worker(3, "decode")], "no_prefill_worker"),
        ([worker(1, "prefill", state="draining"), worker(3, "decode")], "no_prefill_worker"),
        ([worker(1, "prefill"), worker(3, "decode", free=7)], "decode_blocks"),
        ([worker(1, "prefill"), worker(3, "decode", lanes=())], "no_lane"),
        ([dataclasses.replace(worker(1, "prefill"), is_refusing=True), worker(3, "decode")], "prefill_time"),
        ([worker(1, "prefill"), dataclasses.replace(worker(3, "decode"), is_suspect=True)], "no_decode_worker"),
        ([worker(1, "prefill"), dataclasses.replace(worker(3, "decode"), is_listed=False)], "no_decode_worker"),
        ([worker(1, "prefill"), dataclasses.replace(worker(3, "decode"), load=None)], "no_decode_worker"),
    ],
)
def test_a_wait_names_what_is_missing(workers: list[WorkerSnapshot], label: str) -> None:
    need = Need(64, 100)
    if label == "decode_blocks":
        workers = [dataclasses.replace(w, load=dataclasses.replace(w.load, running=1)) for w in workers if w.load]
    assert route(workers, need) == Wait(label)  # type: ignore[arg-type]
    is_busy = label in ("decode_blocks", "prefill_time")
    assert (find_missing(workers, "always") is None) == is_busy


def test_own_dispatches_count_until_a_load_counts_them() -> None:
    sent = dataclasses.replace(
        worker(3, "decode", last_dispatch=1), pending=(Dispatched(1, 40, 0), Dispatched(2, 60, 0))
    )
    assert sent.blocks_free == 40
    assert sent.num_requests == 1


def test_a_prefill_worker_that_failed_is_avoided_while_there_is_another() -> None:
    both = [worker(1, "prefill"), worker(2, "prefill", queued=900), worker(3, "decode")]
    need = Need(32, 100, avoid=frozenset({1}))
    assert isinstance(chosen := route(both, need), Route)
    assert chosen.prefill == 2
    assert isinstance(chosen := route([both[0], both[2]], need), Route)
    assert chosen.prefill == 1


NAMES = [bytes([i]) * 16 for i in range(4)]


def holding(snapshot: WorkerSnapshot, num_blocks: int) -> WorkerSnapshot:
    return dataclasses.replace(snapshot, cached={*NAMES[:num_blocks], b"x" * 16})


def test_cached_tokens_end_at_the_first_unknown_block() -> None:
    need = Need(100, 8, names=lambda block_tokens: NAMES if block_tokens == 16 else ())
    held = dataclasses.replace(worker(3, "decode"), cached={NAMES[0], NAMES[1], NAMES[3]})
    assert need.cached_tokens(held) == 32
    assert need.cached_tokens(worker(3, "decode")) == 0
    assert need.cached_tokens(holding(worker(3, "decode"), 4)) == 64


@pytest.mark.parametrize("draw", [0.0, 0.99])
def test_among_equals_the_worker_with_the_longest_prefix_is_taken(draw: float) -> None:
    need = Need(100, 8, names=lambda block_tokens: NAMES)
    prefills = [worker(1, "prefill"), holding(worker(2, "prefill"), 3)]
    decodes = [worker(3, "decode"), holding(worker(4, "decode", free=95), 1), holding(worker(5, "decode", free=92), 2)]
    chosen = route([*prefills, *decodes], need, draw=draw)
    assert isinstance(chosen, Route)
    assert (chosen.prefill, chosen.decode) == (2, 5)
    alone = [dataclasses.replace(w, role="colocated") for w in decodes]
    assert isinstance(chosen := route(alone, need, mode="never", draw=draw), Route)
    assert chosen.decode == 5


def test_a_prefix_does_not_outweigh_a_queue_or_a_full_pool() -> None:
    need = Need(100, 8, names=lambda block_tokens: NAMES)
    prefills = [worker(1, "prefill"), holding(worker(2, "prefill", queued=65), 4)]
    decodes = [worker(3, "decode"), holding(worker(4, "decode", free=70), 4)]
    assert isinstance(chosen := route([*prefills, *decodes], need), Route)
    assert (chosen.prefill, chosen.decode) == (1, 3)


def test_names_are_asked_for_only_where_there_is_a_choice() -> None:
    def refuse(block_tokens: int) -> list[bytes]:
        raise AssertionError("one worker of each kind")

    assert isinstance(route([worker(1, "prefill"), worker(3, "decode")], Need(32, 8, names=refuse)), Route)
    both = [holding(worker(1, "prefill"), 1), holding(worker(3, "decode"), 1)]
    assert isinstance(route(both, Need(32, 8, names=refuse)), Route)


def test_a_worker_that_can_never_hold_the_request_is_not_asked() -> None:
    small = worker(1, "prefill")
    assert small.identity is not None
    small = dataclasses.replace(
        small, identity=dataclasses.replace(small.identity, blocks_total=10, max_context_tokens=160)
    )
    workers = [small, worker(2, "prefill", queued=9000), worker(3, "decode")]
    assert isinstance(chosen := route(workers, Need(160, 8)), Route)
    assert chosen.prefill == 2
    assert isinstance(chosen := route(workers, Need(159, 8)), Route)
    assert chosen.prefill == 1


def test_groups_with_windows_hold_what_they_see() -> None:
    """Ten known pages and four of headroom; 100 positions touch eight pages at most."""
    identity = worker(3, "decode").identity
    assert identity is not None
    mixed = dataclasses.replace(identity, windows=(None, 100, 100))
    assert Need(160, 800).num_blocks(identity) == 14
    assert Need(160, 800).num_blocks(mixed) == 14 + 8 + 8
    assert Need(16, 0).num_blocks(mixed) == 3


def test_a_request_alone_may_take_the_reserve() -> None:
    assert isinstance(route([worker(1, "prefill"), worker(3, "decode")], Need(96 * 16, 100)), Route)


def test_pool_tokens_is_the_smaller_of_the_largest() -> None:
    small = dataclasses.replace(
        worker(1, "prefill"),
        identity=dataclasses.replace(worker(1, "prefill").identity, blocks_total=10, max_context_tokens=160),
    )  # type: ignore[type-var]
    assert pool_tokens([small, worker(3, "decode")]) == 160
    assert pool_tokens([]) is None


@dataclass(eq=False)
class Member:
    arrival: tuple[float, int]


def test_a_returning_member_stands_where_it_stood() -> None:
    queue: ArrivalQueue[Member] = ArrivalQueue()
    first, second, third = (Member((1.0, i)) for i in range(3))
    for member in (third, second):
        queue.push(member)
    queue.push(first)
    assert queue.head() is first
    queue.remove(first)
    queue.remove(first)
    assert (queue.head(), len(queue)) == (second, 2)


OPEN = Door(num_queued=0, max_queued=2, head_waited_s=0, has_workers=True, may_come=True, is_closing=False)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, None),
        ({"num_queued": 1}, None),
        ({"num_queued": 2}, 429),
        ({"has_workers": False}, None),
        ({"has_workers": False, "may_come": False}, 503),
        ({"is_closing": True}, 503),
    ],
)
def test_admission(change: dict[str, object], status: int | None) -> None:
    decision = decide_admission(dataclasses.replace(OPEN, **change))  # type: ignore[arg-type]
    if status is None:
        assert decision == "admit"
    else:
        assert isinstance(decision, ApiError)
        assert decision.status == status
        assert decision.retry_after_s


BUDGETS = Budgets(failed_transfers=2, crashes=2)
FRESH = Situation(has_tokens=False, spent=Spent(), another_prefill=False, local_allowed=True)


@pytest.mark.parametrize("failure", ["busy", "draining", "unknown", "prefill_lost"])
def test_refusals_drains_lost_links_and_lost_answers_cost_nothing(failure: Failure) -> None:
    assert decide_retry(failure, FRESH, BUDGETS) == Retry(Spent())


def test_transfers_are_charged_and_fall_back() -> None:
    failure: Failure = "transfer"
    charged = Spent(failed_transfers=1)
    assert decide_retry(failure, FRESH, BUDGETS) == Retry(charged, is_local=True)
    assert decide_retry(failure, dataclasses.replace(FRESH, another_prefill=True), BUDGETS) == Retry(charged)
    tired = dataclasses.replace(FRESH, another_prefill=True, spent=Spent(failed_transfers=2))
    assert decide_retry(failure, tired, BUDGETS) == Retry(Spent(failed_transfers=3), is_local=True)
    refused = decide_retry(failure, dataclasses.replace(tired, local_allowed=False), BUDGETS)
    assert isinstance(refused, ApiError)


@pytest.mark.parametrize("failure", ["draining", "unknown", "transfer", "prefill_lost", "decode_lost", "internal"])
def test_after_the_first_token_everything_is_an_error(failure: Failure) -> None:
    verdict = decide_retry(failure, dataclasses.replace(FRESH, has_tokens=True), BUDGETS)
    assert isinstance(verdict, ApiError)
    assert verdict.status in (500, 503)


@pytest.mark.parametrize(
    ("failure", "status"),
    [("invalid", 400), ("first_token_deadline", 503), ("progress_deadline", 503), ("total_deadline", 504)],
)
def test_final_failures(failure: Failure, status: int) -> None:
    verdict = decide_retry(failure, FRESH, BUDGETS)
    assert isinstance(verdict, ApiError)
    assert verdict.status == status


def test_the_second_crash_ends_a_request() -> None:
    once = decide_retry("decode_lost", FRESH, BUDGETS)
    assert once == Retry(Spent(crashes=1))
    assert isinstance(
        decide_retry("decode_lost", dataclasses.replace(FRESH, spent=Spent(crashes=1)), BUDGETS), ApiError
    )
