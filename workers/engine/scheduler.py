"""Which tokens run in the next step. Pure decisions over requests and the block pool.

There are no phases: a request has known tokens and computed tokens, and a step lets the second catch up with the first.
Decodes go first, oldest first; each adds one token. A decode that finds no block preempts the youngest running request,
itself at worst. Then preempted requests come back, oldest first, where blocks for all they know are free. Then prompts
share the step's prompt budget: shortest remaining first, a waiting one ranking shorter each second so that none waits
for ever.
"""

from collections.abc import Sequence

from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.plan import Chunk, StepPlan
from workers.engine.request import Request


class Scheduler:
    """Allocates and frees blocks of `pool` for running requests. Holds no request."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool

    def schedule(self, requests: Sequence[Request], now: float) -> tuple[StepPlan, list[Request]]:
        """The next step and the requests that were preempted for it.

        `requests` are in order of arrival; those neither running nor preempted are passed over. After the call every
        chunk of the plan has its blocks.
        """
        running = [request for request in requests if request.status == "running"]
        decodes = [request for request in running if not request.is_prompt_left]
        preempted: list[Request] = []
        chunks = [self._plan_chunk(request, 1) for request in decodes if self._grow(request, running, preempted)]
        if not preempted:
            running += self._readmit(requests)
        prompts = [request for request in running if request.status == "running" and request.is_prompt_left]
        chunks += self._plan_prompts(prompts, now)
        return StepPlan(tuple(chunks)), preempted

    def can_readmit(self, requests: Sequence[Request]) -> bool:
        """Whether the oldest preempted request finds its blocks now."""
        waiting = next((request for request in requests if request.status == "preempted"), None)
        return waiting is not None and self._has_room(waiting, sum(r.status == "running" for r in requests))

    # --- decodes ------------------------------------------------------------------------------------------------------

    def _grow(self, request: Request, running: list[Request], preempted: list[Request]) -> bool:
        """Whether `request` still runs and has the block that its next token is written to."""
        if request.status != "running":
            return False
        if request.computed < len(request.blocks) * self._config.block_tokens:
            return True
        while not self._pool.num_free:
            # The youngest is never in the plan already: decodes are planned oldest first.
            victim = next(r for r in reversed(running) if r.status == "running" and not r.hold_after_prompt)
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        request.blocks += self._pool.allocate(1)
        return True

    def _preempt(self, request: Request) -> None:
        request.apply("preempt")
        self._pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.reason = "preempt"
        request.catch_up_to = len(request.known)

    # --- preempted requests come back ---------------------------------------------------------------------------------

    def _readmit(self, requests: Sequence[Request]) -> list[Request]:
        num_running = sum(request.status == "running" for request in requests)
        readmitted = []
        for request in requests:
            if request.status != "preempted":
                continue
            if not self._has_room(request, num_running):
                break
            request.blocks = self._pool.allocate(self._config.blocks_for(len(request.known)))
            request.apply("readmit")
            readmitted.append(request)
            num_running += 1
        return readmitted

    def _has_room(self, request: Request, num_running: int) -> bool:
        """Blocks for all it knows, and one for each running request: the next decode must not preempt it again at
        once."""
        return self._pool.num_free >= self._config.blocks_for(len(request.known)) + num_running

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _plan_prompts(self, prompts: list[Request], now: float) -> list[Chunk]:
        rate = self._config.ageing_tokens_per_s
        ranked = sorted(prompts, key=lambda r: r.catch_up_to - r.computed - rate * (now - r.arrival))
        budget = self._config.chunk_tokens
        chunks = []
        for request in ranked:
            if not budget:
                break
            chunk = self._plan_chunk(request, min(budget, request.num_uncomputed))
            budget -= len(chunk.tokens)
            chunks.append(chunk)
        return chunks

    def _plan_chunk(self, request: Request, num_tokens: int) -> Chunk:
        first, end = request.computed, request.computed + num_tokens
        assert end <= len(request.blocks) * self._config.block_tokens, (
            f"{request.key!r} has no block for token {end - 1}"
        )
        is_last = end == len(request.known)
        return Chunk(
            key=request.key,
            tokens=tuple(request.known[first:end]),
            first_position=first,
            blocks=tuple(request.blocks),
            sampling=request.sampling if is_last else None,
            output_position=request.num_outputs,
            explain=is_last and request.explain and request.num_outputs == request.num_emitted,
            is_prompt=request.is_prompt_left,
        )
