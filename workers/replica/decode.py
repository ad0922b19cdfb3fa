"""The decode role: reserve, grant, adopt, speak. Also the colocated role, which computes its own prompts as a matter of
routine.

Runs on the engine thread. Only decode speaks: the first token goes out as position len(emitted) when the hand-off
verifies, then one token after the other. Prompt tokens are computed here only for a named reason.

    GENERATE(source) -> reserve, expect, ACCEPT -> Arrived -> adopt -> tokens ... END
    GENERATE(local)  -> reserve, ACCEPT, start  -> tokens ... END
    TransferFailed   -> revoke, blocks back (those of an open write window after their proof), FAILED(transfer)
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_transfer.channel import KVReceiver
from kv_transfer.errors import FrameInvalid
from kv_transfer.events import Arrived, BlocksProven, ReceiverEvent, ReceiveTrace, TransferFailed
from kv_transfer.messages import TransferKey
from workers.engine.engine import Engine, StepResult
from workers.engine.request import Reason, Request
from workers.protocol import (
    BusyReason,
    DecodeTimings,
    End,
    Generate,
    Prefill,
    StreamKey,
)
from workers.replica.config import ReplicaConfig
from workers.replica.desk import Desk
from workers.replica.handoff import HANDOFF_CODEC, HandOff
from workers.replica.role import Role, now_us
from workers.replica.streams import Attempt

KEEP_FREE_SHARE = 0.02
ITL_WEIGHT = 0.1
QUARANTINE_LIMIT_S = 30.0


@dataclass(slots=True)
class Sitting:
    """One stream at this worker, reserved or running. Times are microseconds of the monotonic clock."""

    key: StreamKey
    num_tokens: int
    """Prompt and emitted tokens."""
    num_cached: int
    """Those of them that were here before."""
    num_emitted: int
    accepted_us: int
    is_explained: bool
    is_remote: bool
    is_awaiting: bool
    adopted_us: int = 0
    first_us: int = 0
    last_us: int = 0
    num_steps: int = 0
    trace: ReceiveTrace | None = None
    facts: list[dict[str, object]] = field(default_factory=list)


class DecodeRole(Role):
    """`receiver` is None on colocated workers: every GENERATE is then local."""

    def __init__(self, config: ReplicaConfig, engine: Engine, receiver: KVReceiver | None, desk: Desk) -> None:
        super().__init__(config, engine, desk)
        self._receiver = receiver
        self._sittings: dict[StreamKey, Sitting] = {}
        self._quarantined_since: dict[int, float] = {}
        self._last_decode_us = 0
        self.itl_us = 0.0

    # --- requests ---------------------------------------------------------------------------------------------------

    def generate(self, ingress: int, message: Generate) -> None:
        """Reserves blocks and accepts the stream, or answers BUSY."""
        is_remote = message.local == "none"
        reason: Reason = "routine" if self._receiver is None or message.local == "none" else message.local
        request = self._admit(ingress, message, reason=reason, hold=False)
        if request is None:
            return
        key, num_tokens = request.key, len(request.known)
        self._sittings[key] = Sitting(
            key, num_tokens, request.num_cached, request.num_emitted, now_us(), message.explain, is_remote,
            is_awaiting=is_remote,
        )  # fmt: skip
        if is_remote:
            assert self._receiver is not None
            # What is cached is pinned by the reservation and outside of what the grant lets anybody write.
            self._receiver.expect(TransferKey(*key), message.source, request.tables, num_tokens, request.num_cached)
        else:
            self._engine.start(key)

    def _refusal(self, message: Generate | Prefill, request: Request) -> BusyReason | None:
        if isinstance(message, Generate) and message.local == "none":
            sources = self._receiver.open_sources() if self._receiver is not None else frozenset()
            if message.source not in sources:
                return "no_lane"
        return "slots" if len(self._sittings) >= self._config.max_running else None

    def _skip_tokens(self, message: Generate | Prefill, request: Request) -> int:
        return request.num_cached if isinstance(message, Generate) and message.local == "none" else 0

    def _num_pages(self, request: Request) -> int:
        """The pages of prompt and emitted tokens, and up to headroom_blocks that the stream may still come to need."""
        pages_for = self._engine.config.pages_for
        held = pages_for(len(request.known))
        most = min(request.num_prompt + request.sampling.max_tokens, self._config.max_context_tokens)
        return held + min(self._config.headroom_blocks, max(0, pages_for(most) - held))

    def _keep_free(self) -> int:
        """A grant leaves 2 % of the pool free, except where nothing else holds a block."""
        return int(KEEP_FREE_SHARE * self._config.num_blocks) if self._sittings else 0

    def expire(self, attempt: Attempt) -> None:
        """No token came in time."""
        sitting = self._sittings.get(attempt.key)
        in_transfer = sitting is not None and sitting.is_awaiting
        self._let_go(attempt.key, "deadline")
        self.desk.fail(attempt.key, "deadline", "transfer" if in_transfer else "decode")

    def _let_go(self, key: StreamKey, reason: str) -> None:
        """Revokes the grant, gives blocks back but for the open write window, which waits for its proof."""
        if self._sittings.pop(key, None) is None:
            return
        quarantined: tuple[int, ...] = ()
        if self._receiver is not None:
            quarantined = self._receiver.revoke(TransferKey(*key), reason)
        for block in quarantined:
            self._quarantined_since[block] = self.desk.clock()
        self._engine.release(key, quarantined)

    # --- the transfer -----------------------------------------------------------------------------------------------

    def transfer(self, event: ReceiverEvent) -> None:
        """A hand-off arrived or failed, or quarantined blocks are proven."""
        if isinstance(event, Arrived):
            self._adopt(StreamKey(*event.key), event)
        elif isinstance(event, TransferFailed):
            key, reason = StreamKey(*event.key), event.reason
            self._let_go(key, reason)
            self.desk.fail(key, "peer_lost" if reason == "peer_lost" else "transfer", "transfer")
        elif isinstance(event, BlocksProven):
            self._prove(event.blocks)

    def _prove(self, blocks: Iterable[int]) -> None:
        proven = [block for block in blocks if self._quarantined_since.pop(block, None) is not None]
        self._engine.prove(proven)

    def _adopt(self, key: StreamKey, event: Arrived) -> None:
        sitting = self._sittings.get(key)
        if sitting is None or not sitting.is_awaiting:
            return
        try:
            meta = HANDOFF_CODEC.decode(event.meta)
        except FrameInvalid:
            meta = None
        if not isinstance(meta, HandOff) or (meta.position, meta.num_tokens) != (
            sitting.num_emitted,
            sitting.num_tokens,
        ):
            self._let_go(key, "bad hand-off")
            self.desk.fail(key, "transfer", "transfer")
            return
        sitting.is_awaiting, sitting.adopted_us, sitting.trace = False, now_us(), event.trace
        self._engine.adopt(key, meta.token, meta.logprobs)

    # --- the engine's step ------------------------------------------------------------------------------------------

    def stepped(self, result: StepResult) -> None:
        """Passes tokens on, ends finished streams, and measures the time between steps."""
        now = now_us()
        if result.num_decodes:
            self._note_decode_step(now)
        for key, facts in result.explains:
            if key in self._sittings and len(self._sittings[key].facts) < 8:
                self._sittings[key].facts.append(facts)
        for output in result.outputs:
            self.desk.token(output.key, output.position, output.token, output.logprobs)
            sitting = self._sittings.get(output.key)
            if sitting is not None:
                sitting.first_us, sitting.last_us = sitting.first_us or now, now
                sitting.num_steps += 1
        for finished in result.finished:
            self._end(finished.key, End(*finished.key, finished.count, finished.reason, self._timings(finished.key)))
        if not self._engine.has_work:
            self._last_decode_us, self.itl_us = 0, 0.0

    def _note_decode_step(self, now: int) -> None:
        if self._last_decode_us:
            gap = now - self._last_decode_us
            self.itl_us += ITL_WEIGHT * (gap - self.itl_us) if self.itl_us else gap
        self._last_decode_us = now

    def _end(self, key: StreamKey, end: End) -> None:
        sitting = self._sittings.pop(key, None)
        if sitting is not None and sitting.is_explained:
            units = sitting.trace.units if sitting.trace is not None else ()
            facts = {"arrivals": [(u.num_bytes, u.arrived_us) for u in units], "tokens": sitting.facts}
            self.desk.explain(key, lambda document: json.dumps(document).encode(), facts)
        self.desk.finish(key, end)

    def _timings(self, key: StreamKey) -> DecodeTimings:
        sitting = self._sittings.get(key)
        if sitting is None:
            return DecodeTimings()
        units = sitting.trace.units if sitting.trace is not None else ()
        return DecodeTimings(
            adopt_us=max(0, sitting.adopted_us - sitting.accepted_us) if sitting.is_remote else 0,
            decode_us=sitting.last_us - sitting.first_us,
            num_steps=sitting.num_steps,
            received_bytes=sum(u.num_bytes for u in units),
            num_units=len(units),
            prompt_tokens=0 if sitting.is_remote else sitting.num_tokens - sitting.num_cached,
        )

    def quarantine_fault(self) -> str | None:
        """What is wrong when blocks stay in quarantine for longer than QUARANTINE_LIMIT_S."""
        if not self._quarantined_since:
            return None
        age = self.desk.clock() - min(self._quarantined_since.values())
        if age <= QUARANTINE_LIMIT_S:
            return None
        return f"{len(self._quarantined_since)} blocks in quarantine for {age:.0f} s, limit {QUARANTINE_LIMIT_S:.0f} s"
