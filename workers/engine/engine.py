"""The engine of one replica. Read `Engine.step` first: schedule, run, update; everything else decides what it sees.

    reserve ---> RESERVED --start--> RUNNING (computes its known tokens, then decodes) ---> finished
                     |                 |  ^
                     +--adopt (KV came)+  +-- preempted, recomputed when blocks allow
                                       +----> HELD (prefill role: first token sampled, blocks kept until release)

A prefill worker and a decode worker are this engine with different admission. Pure: no torch, no asyncio, no wall
clock; the runner is given. Owned by the engine thread: nothing here may be called from another, nor from
an observer.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, get_args

from workers.engine.allotment import Allotment
from workers.engine.config import EngineConfig
from workers.engine.cost import StepCosts, StepShape
from workers.engine.plan import Runner, RunResult, StepObserver, StepPlan, ignore_layer
from workers.engine.request import Reason, Request, Status
from workers.engine.scheduler import Scheduler
from workers.engine.table import RequestTable
from workers.protocol import ComputedPrompt, FinishReason, Logprobs, StreamKey


@dataclass(frozen=True, slots=True)
class Output:
    """One output token of one stream; positions of a stream have no gap and no repeat."""

    key: StreamKey
    position: int
    token: int
    logprobs: Logprobs | None = None


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

    def __init__(self, config: EngineConfig, runner: Runner, *, costs: StepCosts | None = None) -> None:
        self.config = config
        self.observer: StepObserver | None = None
        self._blocks = Allotment(config)
        self.pool, self.prefixes = self._blocks.pool, self._blocks.prefixes
        self._runner, self._costs = runner, costs
        self._requests = RequestTable()
        self._scheduler = Scheduler(config, self._requests, self._blocks, costs)
        self._adopted: dict[StreamKey, tuple[int, Logprobs | None]] = {}
        self._computed_prompt: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)

    # --- admission ----------------------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> int:
        """Known tokens that `reserve` would find in the prefix cache now; changes nothing."""
        return self._blocks.find_prefix(request)

    def reserve(self, request: Request, num_pages: int, keep_free_blocks: int = 0) -> bool:
        """Give `request` tables of `num_pages` pages (RESERVED), or return False with nothing changed.

        A group with a window holds blocks for a part of them at a time: as many as it will ever need are promised. What
        the prefix cache has of its text is shared: `computed` and `num_cached` say how much, and nothing may write
        there. False when too few blocks are available or fewer than `keep_free_blocks` would stay so, when
        `max_running` requests are open, and as long as a preempted request waits. Raises ValueError for a request that
        this engine can never serve.
        """
        self._check_request(request, num_pages)
        if self.num_open >= self.config.max_running or self.count("preempted"):
            return False
        if not self._blocks.has_room(request, num_pages, keep_free_blocks):
            return False
        self._blocks.give(request, num_pages)
        request.num_cached = request.computed
        self._requests.apply(request, "reserve")
        return True

    def start(self, key: StreamKey) -> None:
        """Compute the known tokens from `request.computed` on, then decode."""
        request = self._named(key)
        assert not request.adopts, f"{key!r} has blocks for what the first decode step sees only"
        self._requests.apply(request, "start")
        request.catch_up_to = len(request.known)

    def adopt(self, key: StreamKey, first_token: int, logprobs: Logprobs | None = None) -> None:
        """The KV of all known tokens has arrived in the blocks and is verified; the next step emits `first_token` and
        computes nothing."""
        request = self._named(key)
        self._requests.apply(request, "adopt")
        request.computed = len(request.known)
        self._blocks.note_computed(request)
        self._adopted[key] = first_token, logprobs

    def release(self, key: StreamKey, quarantine: Collection[int] = ()) -> None:
        """Forget the request, from any status; its blocks are free or cached but for the quarantined ones. Unknown keys
        are fine."""
        request = self._requests.get(key)
        if request is None:
            assert not quarantine, f"{key!r} is gone and its blocks may be used by others: quarantine comes too late"
            return
        self._requests.apply(request, "release")
        self._adopted.pop(key, None)
        self._blocks.take_back(request, quarantine)

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
        made = self._scheduler.schedule()
        result.preempted = [request.key for request in made.preempted]
        if not made.chunks:
            return result
        plan = made.plan
        run = self._run(plan)
        if self._costs is not None:
            self._costs.observe(made.shape, run.step_us / 1000)
        self._update(plan, run, result)
        return result

    def _emit_adopted(self, result: StepResult) -> None:
        adopted, self._adopted = self._adopted, {}
        for key, (token, logprobs) in adopted.items():
            self._append(self._named(key), token, logprobs, result)

    def _run(self, plan: StepPlan) -> RunResult:
        observer = self.observer
        if observer is None:
            return self._runner.execute(plan, ignore_layer)
        observer.planned(plan)
        run = self._runner.execute(plan, lambda layer: observer.layer_done(plan, layer))
        observer.computed(plan)
        return run

    def _update(self, plan: StepPlan, run: RunResult, result: StepResult) -> None:
        result.step_us = run.step_us
        for index, (chunk, token, explain) in enumerate(zip(plan.chunks, run.tokens, run.explains, strict=True)):
            request = self._named(chunk.key)
            num_tokens = len(chunk.tokens)
            request.computed += num_tokens
            self._blocks.note_computed(request)
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
                self._append(request, token, run.logprobs.get(index), result)

    def _append(self, request: Request, token: int, logprobs: Logprobs | None, result: StepResult) -> None:
        """Emit one output token and let the request finish, be held, or go on."""
        result.outputs.append(Output(request.key, request.num_outputs, token, logprobs))
        request.known.append(token)
        reason = self._finish_reason(request, token)
        if request.hold_after_prompt:
            self._requests.apply(request, "hold")
        elif reason is not None:
            self._requests.apply(request, "finish")
            self._blocks.take_back(request)
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
        return bool(self._adopted or self._requests.running) or self._scheduler.can_readmit()

    def get(self, key: StreamKey) -> Request | None:
        """The request, or None once it is finished or released."""
        return self._requests.get(key)

    def count(self, status: Status) -> int:
        """Requests in this status."""
        return self._requests.count(status)

    @property
    def num_open(self) -> int:
        """Requests that count against `max_running`: reserved, running, preempted."""
        return len(self._requests) - self.count("held")

    @property
    def num_available_blocks(self) -> int:
        """Free and cached blocks that are promised to nobody."""
        return self._blocks.num_available

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of running and preempted requests that are not computed yet."""
        waiting = (*self._requests.running, *self._requests.preempted)
        return sum(max(0, request.catch_up_to - request.computed) for request in waiting)

    def predict_prompt_ms(self, num_tokens: int) -> float:
        """Milliseconds that so many prompt tokens take; 0 for an engine without costs."""
        if self._costs is None:
            return 0.0
        shape = StepShape()
        shape.add_prompt(num_tokens, 0)
        return self._costs.predict(shape)

    @property
    def computed_prompt(self) -> ComputedPrompt:
        """Prompt tokens computed since the engine exists, by reason."""
        return ComputedPrompt(**self._computed_prompt)

    def check_integrity(self) -> None:
        """Assert that used blocks are those of requests, that none is written while shared, and that none holds too
        few."""
        self._blocks.check_integrity(list(self._requests.all()))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_request(self, request: Request, num_pages: int) -> None:
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
        needed = self.config.blocks_to_hold(num_pages)
        if num_pages < self.config.pages_for(known) or needed > self.config.num_blocks:
            raise ValueError(
                f"{num_pages} pages of {needed} blocks do not fit {known} tokens and a pool of {self.config.num_blocks}"
            )

    def _named(self, key: StreamKey) -> Request:
        request = self._requests.get(key)
        assert request is not None, f"{key!r} is not here"
        return request
