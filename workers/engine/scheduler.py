"""Which tokens run in the next step. Pure decisions over requests and their blocks.

There are no phases: a request has known tokens and computed tokens, and a step lets the second catch up with the first.
Requests rank by seniority: time of arrival, a level of priority counting as some seconds of waiting. Decodes go first;
each adds one token. A decode that finds no block preempts the last in rank, itself at worst. Then preempted requests
come back in rank, where blocks for all they know are free. Then prompts share what is left of the step: shortest
remaining first, a waiting one ranking shorter each second, so that none waits for ever.

What is left is a number of tokens, and of milliseconds where a budget is set: measured costs turn it into tokens.
"""

from dataclasses import dataclass, field

from workers.engine.allotment import Allotment
from workers.engine.config import EngineConfig
from workers.engine.cost import StepCosts, StepShape
from workers.engine.plan import Chunk, StepPlan
from workers.engine.request import Request
from workers.engine.table import RequestTable


@dataclass(slots=True)
class Schedule:
    """What a step will run, what it will cost, and who was preempted for it."""

    chunks: list[Chunk] = field(default_factory=list)
    shape: StepShape = field(default_factory=StepShape)
    preempted: list[Request] = field(default_factory=list)

    @property
    def plan(self) -> StepPlan:
        return StepPlan(tuple(self.chunks))


class Scheduler:
    """Gives and takes the blocks of running requests."""

    def __init__(
        self, config: EngineConfig, requests: RequestTable, blocks: Allotment, costs: StepCosts | None = None
    ) -> None:
        self._config, self._requests, self._blocks, self._costs = config, requests, blocks, costs

    def schedule(self) -> Schedule:
        """The next step. After the call every chunk has its blocks."""
        made, prompts = Schedule(), list[Request]()
        for request in list(self._requests.running):
            if request.status != "running":
                continue
            if request.is_prompt_left:
                prompts.append(request)
            elif self._grow(request, made):
                made.shape.add_decode(request.computed)
                made.chunks.append(self._plan_chunk(request, 1))
        if made.preempted:
            prompts = [request for request in prompts if request.status == "running"]
        else:
            prompts += self._readmit()
        if prompts:
            self._plan_prompts(prompts, made)
        return made

    def can_readmit(self) -> bool:
        """Whether the first preempted request finds its blocks now."""
        waiting = self._requests.preempted
        return bool(waiting) and self._has_room(waiting[0])

    # --- decodes ------------------------------------------------------------------------------------------------------

    def _grow(self, request: Request, made: Schedule) -> bool:
        """Whether `request` still runs and has the block that its next token is written to."""
        if request.computed < request.num_pages * self._config.block_tokens:
            return True
        while not self._blocks.can_grow(request):
            # The last in rank is never in the plan already: decodes are planned in rank.
            victim = next(r for r in reversed(self._requests.running) if not r.hold_after_prompt)
            self._preempt(victim)
            made.preempted.append(victim)
            if victim is request:
                return False
        self._blocks.grow(request)
        return True

    def _preempt(self, request: Request) -> None:
        self._requests.apply(request, "preempt")
        self._blocks.take_back(request)
        request.computed, request.adopts = 0, False
        request.reason = "preempt"
        request.catch_up_to = len(request.known)

    # --- preempted requests come back ---------------------------------------------------------------------------------

    def _readmit(self) -> list[Request]:
        readmitted = []
        while self.can_readmit():
            request = self._requests.preempted[0]
            self._blocks.give(request, self._config.pages_for(len(request.known)))
            self._requests.apply(request, "readmit")
            readmitted.append(request)
        return readmitted

    def _has_room(self, request: Request) -> bool:
        """Blocks for all it knows, and a page for each running request: the next decode must not preempt it again at
        once."""
        keep_free = self._requests.count("running") * self._blocks.blocks_per_page
        return self._blocks.has_room(request, self._config.pages_for(len(request.known)), keep_free)

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _plan_prompts(self, prompts: list[Request], made: Schedule) -> None:
        rate = self._config.ageing_tokens_per_s
        budget = self._config.chunk_tokens
        # Ageing by `rate` x (now - seniority) ranks like this for any now.
        for request in sorted(prompts, key=lambda r: r.catch_up_to - r.computed + rate * r.seniority):
            num_tokens = self._fit(request, min(budget, request.num_uncomputed), made.shape)
            if not num_tokens:
                return
            made.shape.add_prompt(num_tokens, request.computed)
            made.chunks.append(self._plan_chunk(request, num_tokens))
            budget -= num_tokens

    def _fit(self, request: Request, most: int, shape: StepShape) -> int:
        """Tokens of this prompt that still fit the step, at most `most`; the first prompt of a step always moves on."""
        budget_ms = self._config.step_budget_ms
        if self._costs is None or budget_ms is None:
            return most
        num_tokens = self._costs.tokens_for(budget_ms, shape, request.computed, most)
        return num_tokens if shape.prompt_tokens else max(num_tokens, min(most, self._config.min_chunk_tokens))

    def _plan_chunk(self, request: Request, num_tokens: int) -> Chunk:
        first, end = request.computed, request.computed + num_tokens
        self._blocks.cover(request, end)
        is_last = end == len(request.known)
        return Chunk(
            key=request.key,
            tokens=tuple(request.known[first:end]),
            first_position=first,
            tables=tuple(map(tuple, request.tables)),
            sampling=request.sampling if is_last else None,
            output_position=request.num_outputs,
            explain=is_last and request.explain and request.num_outputs == request.num_emitted,
            is_prompt=request.is_prompt_left,
            history=_split_history(request) if is_last and request.sampling.looks_back else None,
        )


def _split_history(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(request.known[: request.num_prompt]), tuple(request.known[request.num_prompt :])
