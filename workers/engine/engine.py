"""The engine of one replica. Read `Engine.step` first: schedule, run, update; everything else decides what it sees.

    reserve ---> RESERVED --start--> RUNNING (computes its known tokens, then decodes) ---> finished
                     |                 |  ^
                     +--adopt (KV came)+  +-- preempted, recomputed when blocks allow
                                       +----> HELD (prefill role: first token sampled, blocks kept until release)

A prefill worker and a decode worker are this engine with different admission. Pure: no torch, no asyncio, no wall
clock; the runner and the clock are given. Owned by the engine thread: nothing here may be called from another, nor from
an observer.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, get_args

from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.plan import Runner, RunResult, StepObserver, StepPlan
from workers.engine.request import Reason, Request, Status
from workers.engine.scheduler import Scheduler
from workers.protocol import ComputedPrompt, FinishReason, StreamKey


@dataclass(frozen=True, slots=True)
class Output:
    """One output token of one stream; positions of a stream have no gap and no repeat."""

    key: StreamKey
    position: int
    token: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The stream is complete with `count` output tokens, those of earlier attempts included; its blocks are free."""

    key: StreamKey
    reason: FinishReason
    count: int


@dataclass(slots=True)
class StepResult:
    outputs: list[Output] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    preempted: list[StreamKey] = field(default_factory=list)
    explains: list[tuple[StreamKey, dict[str, Any]]] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens that ran."""
    num_decodes: int = 0
    """Requests that ran a decode step."""
    step_us: int = 0
    """Microseconds in the runner."""


class Engine:
    """Requests over one paged KV cache, one step at a time."""

    def __init__(
        self, config: EngineConfig, runner: Runner, clock: Callable[[], float], observer: StepObserver | None = None
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._runner = runner
        self._clock = clock
        self.observer = observer
        self._scheduler = Scheduler(config, self.pool)
        self._requests: dict[StreamKey, Request] = {}
        self._adopted: dict[StreamKey, int] = {}
        self._computed_prompt: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)

    # --- admission ----------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, num_blocks: int, keep_free_blocks: int = 0) -> bool:
        """Give `request` its blocks (RESERVED), or return False with nothing changed.

        False when fewer than `num_blocks + keep_free_blocks` blocks are free, when `max_running` requests are open, and
        as long as a preempted request waits. Raises ValueError for a request that this engine can never serve.
        """
        self._check_request(request, num_blocks)
        if self.num_open >= self.config.max_running or self.count("preempted"):
            return False
        if self.pool.num_free < num_blocks + keep_free_blocks:
            return False
        request.apply("reserve")
        request.blocks = self.pool.allocate(num_blocks)
        self._insert(request)
        return True

    def start(self, key: StreamKey) -> None:
        """Compute the known tokens from `request.computed` on, then decode."""
        request = self._requests[key]
        request.apply("start")
        request.catch_up_to = len(request.known)

    def adopt(self, key: StreamKey, first_token: int) -> None:
        """The KV of all known tokens has arrived in the blocks; the next step emits `first_token` and computes
        nothing."""
        request = self._requests[key]
        request.apply("adopt")
        request.computed = len(request.known)
        self._adopted[key] = first_token

    def release(self, key: StreamKey, quarantine: Collection[int] = ()) -> None:
        """Forget the request, from any status; its blocks are free but for the quarantined ones. Unknown keys are
        fine."""
        request = self._requests.pop(key, None)
        if request is None:
            assert not quarantine, f"{key!r} is gone and its blocks may be used by others: quarantine comes too late"
            return
        request.apply("release")
        self._adopted.pop(key, None)
        self._free(request, quarantine)

    def prove(self, blocks: Collection[int]) -> None:
        """Nothing writes into these quarantined blocks any more."""
        self.pool.prove(blocks)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Schedule, run, update. A step that finds adopted requests emits their first tokens at once and runs
        nothing."""
        result = StepResult()
        if self._adopted:
            self._emit_adopted(result)
            return result
        plan, preempted = self._scheduler.schedule(list(self._requests.values()), self._clock())
        result.preempted = [request.key for request in preempted]
        if not plan.chunks:
            return result
        run = self._run(plan)
        self._update(plan, run, result)
        return result

    def _emit_adopted(self, result: StepResult) -> None:
        adopted, self._adopted = self._adopted, {}
        for key, token in adopted.items():
            self._append(self._requests[key], token, result)

    def _run(self, plan: StepPlan) -> RunResult:
        observer = self.observer
        if observer is None:
            return self._runner.execute(plan, _ignore_layer)
        observer.planned(plan)
        run = self._runner.execute(plan, lambda layer: observer.layer_done(plan, layer))
        observer.computed(plan)
        return run

    def _update(self, plan: StepPlan, run: RunResult, result: StepResult) -> None:
        result.step_us = run.step_us
        for chunk, token, explain in zip(plan.chunks, run.tokens, run.explains, strict=True):
            request = self._requests[chunk.key]
            num_tokens = len(chunk.tokens)
            request.computed += num_tokens
            result.num_tokens += num_tokens
            if chunk.is_prompt:
                self._computed_prompt[request.reason] += num_tokens
            else:
                result.num_decodes += 1
            if explain is not None:
                result.explains.append((chunk.key, explain))
            assert (token is None) == (chunk.sampling is None), (
                f"{chunk.key!r}: the runner sampled where it should not, or not"
            )
            if token is not None:
                self._append(request, token, result)

    def _append(self, request: Request, token: int, result: StepResult) -> None:
        """Emit one output token and let the request finish, be held, or go on."""
        result.outputs.append(Output(request.key, request.num_outputs, token))
        request.known.append(token)
        reason = self._finish_reason(request, token)
        if request.hold_after_prompt:
            request.apply("hold")
        elif reason is not None:
            request.apply("finish")
            del self._requests[request.key]
            self._free(request)
            result.finished.append(Finished(request.key, reason, request.num_outputs))

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        if token in request.sampling.stop_token_ids:
            return "stop"
        if request.num_outputs >= request.sampling.max_tokens or len(request.known) >= self.config.max_context_tokens:
            return "length"
        return None

    # --- what others read ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would run or emit something now."""
        if self._adopted or self.count("running"):
            return True
        return self._scheduler.can_readmit(list(self._requests.values()))

    def get(self, key: StreamKey) -> Request | None:
        """The request, or None once it is finished or released."""
        return self._requests.get(key)

    def count(self, status: Status) -> int:
        """Requests in this status."""
        return sum(request.status == status for request in self._requests.values())

    @property
    def num_open(self) -> int:
        """Requests that count against `max_running`: reserved, running, preempted."""
        return len(self._requests) - self.count("held")

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of running and preempted requests that are not computed yet."""
        return sum(
            max(0, request.catch_up_to - request.computed)
            for request in self._requests.values()
            if request.status in ("running", "preempted")
        )

    @property
    def computed_prompt(self) -> ComputedPrompt:
        """Prompt tokens computed since the engine exists, by reason."""
        return ComputedPrompt(**self._computed_prompt)

    def check_integrity(self) -> None:
        """Assert that each used block belongs to exactly one request, and that no request holds too few."""
        self.pool.check_integrity()
        held = [block for request in self._requests.values() for block in request.blocks]
        assert len(held) == len(set(held)) == self.pool.num_used, "blocks are shared or lost between requests"
        for request in self._requests.values():
            assert request.computed <= len(request.blocks) * self.config.block_tokens, (
                f"{request.key!r} computed past its blocks"
            )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_request(self, request: Request, num_blocks: int) -> None:
        known, context = len(request.known), self.config.max_context_tokens
        if request.key in self._requests:
            raise ValueError(f"{request.key!r} is already here")
        if request.num_prompt < 1 or request.num_prompt + request.num_emitted != known:
            raise ValueError(
                f"{known} known tokens are not {request.num_prompt} prompt and {request.num_emitted} emitted ones"
            )
        if known >= context:
            raise ValueError(f"{known} known tokens leave no room for an output within the context of {context}")
        if request.num_emitted >= request.sampling.max_tokens:
            raise ValueError(f"all of {request.sampling.max_tokens} output tokens are already emitted")
        if not self.config.blocks_for(known) <= num_blocks <= self.config.num_blocks:
            raise ValueError(f"{num_blocks} blocks do not fit {known} tokens and a pool of {self.config.num_blocks}")
        if not 0 <= request.computed < known:
            raise ValueError(
                f"{request.computed} of {known} tokens are computed: the last one must run to be sampled from"
            )

    def _insert(self, request: Request) -> None:
        """Keep the table in order of arrival: requests come nearly sorted, so this is one append."""
        newest = next(reversed(self._requests.values()), None)
        self._requests[request.key] = request
        if newest is not None and newest.arrival > request.arrival:
            self._requests = dict(sorted(self._requests.items(), key=lambda item: item[1].arrival))

    def _free(self, request: Request, quarantine: Collection[int] = ()) -> None:
        self.pool.release(request.blocks, quarantine)
        request.blocks = []


def _ignore_layer(layer: int) -> None:
    """No observer."""
