"""The prefill role: accept whole prompts, compute them, ship their KV while computing, hold the blocks until ADOPTED.

Runs on the engine thread. It samples the first token and hands it over in FIN; it never speaks to the client about
tokens.

    PREFILL -> reserve every block, ACCEPT, BEGIN, start
    layer group of a chunk computed -> push(unit)            (kv_transfer gathers it at once and sends when granted)
    what its own prefix cache has beyond decode's is pushed at once
    prompt computed, first token sampled -> finish(meta)     FIN
    ADOPTED -> END with timings, blocks back                 TransferFailed -> FAILED, blocks back
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.channel import KVSender
from kv_transfer.events import Adopted, SenderEvent, SendTrace, TransferFailed
from kv_transfer.layout import KVLayout, plan_units
from kv_transfer.messages import TransferKey
from workers.engine.engine import Engine, StepResult
from workers.engine.plan import Chunk, StepPlan
from workers.engine.request import Request
from workers.protocol import (
    BusyReason,
    Generate,
    Prefill,
    PrefillEnd,
    PrefillTimings,
    StreamKey,
)
from workers.replica.config import ReplicaConfig
from workers.replica.desk import Desk
from workers.replica.handoff import HANDOFF_CODEC, HandOff
from workers.replica.role import Role, now_us

TTFT_SHARE = 0.3


@dataclass(slots=True)
class Shipment:
    """One prompt on its way: what has been pushed and when its chunks ran. Times are microseconds of the monotonic
    clock.
    """

    key: StreamKey
    num_tokens: int
    num_cached: int
    """Tokens that were in the prefix cache here: they are not computed."""
    accepted_us: int
    is_explained: bool
    pushed_tokens: int
    """Shipped so far, or not to be shipped because decode has them."""
    computed_tokens: int
    chunks: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(first token, tokens, start, last layer's KV written, end) of each chunk."""
    facts: dict[str, object] = field(default_factory=dict)
    groups: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """For the step that runs now: last layer of a group -> (tokens up to, first layer, layers)."""


class PrefillRole(Role):
    """Also the engine's step observer: it learns when a layer of a step has been computed."""

    def __init__(self, config: ReplicaConfig, engine: Engine, sender: KVSender, layout: KVLayout, desk: Desk) -> None:
        super().__init__(config, engine, desk)
        self._sender, self._layout = sender, layout
        self._shipments: dict[StreamKey, Shipment] = {}
        self._step_started_us = self._last_layer_us = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def prefill(self, ingress: int, message: Prefill) -> None:
        """Reserves, accepts and starts a prompt, or answers BUSY. Ships what follows `skip_tokens`, wherever it is
        from."""
        request = self._admit(ingress, message, reason="routine", hold=True)
        if request is None:
            return
        key, num_tokens = request.key, len(request.known)
        self._shipments[key] = shipment = Shipment(
            key, num_tokens, request.num_cached, now_us(), message.explain,
            pushed_tokens=message.skip_tokens, computed_tokens=request.num_cached,
        )  # fmt: skip
        self._sender.begin(TransferKey(*key), message.decode, num_tokens, message.skip_tokens)
        self._push_cached(shipment, request.tables)
        self._engine.start(key)

    def _push_cached(self, shipment: Shipment, tables: Sequence[Sequence[int]]) -> None:
        """Pushes what the cache has and decode has not, as far as it fills units; the rest joins the first chunk."""
        layout, least = self._layout, self._config.min_unit_bytes
        num_tokens = max(self._config.chunk_tokens, -(-least // layout.bytes_per_token))
        while shipment.computed_tokens - shipment.pushed_tokens >= num_tokens:
            for first_layer, num_layers in plan_units(num_tokens, layout, least):
                key = TransferKey(*shipment.key)
                self._sender.push(key, tables, shipment.pushed_tokens, num_tokens, first_layer, num_layers)
            shipment.pushed_tokens += num_tokens

    def _skip_tokens(self, message: Generate | Prefill, request: Request) -> int:
        return 0

    def _refusal(self, message: Generate | Prefill, request: Request) -> BusyReason | None:
        if not isinstance(message, Prefill) or message.decode not in self._sender.open_peers():
            return "no_lane"
        if message.skip_tokens >= len(request.known):
            raise ValueError(f"{message.skip_tokens} of {len(request.known)} tokens are to be skipped: none is left")
        num_tokens = len(request.known) - self._engine.find_prefix(request)
        ahead = self._tokens_ahead(num_tokens)
        allowed_ms = TTFT_SHARE * self._config.ttft_target_ms
        return "prefill_time" if ahead and self._engine.predict_prompt_ms(ahead + num_tokens) > allowed_ms else None

    def _tokens_ahead(self, num_tokens: int) -> int:
        """Uncomputed tokens that go before a new prompt of `num_tokens` uncached ones: the scheduler takes the shortest
        first, so a long prompt that is being computed keeps no short one out."""
        left = (s.num_tokens - s.computed_tokens for s in self._shipments.values())
        return sum(tokens for tokens in left if tokens <= num_tokens)

    def _let_go(self, key: StreamKey, reason: str) -> None:
        if self._shipments.pop(key, None) is not None:
            self._sender.abort(TransferKey(*key), reason)
            self._engine.release(key)

    # --- the engine's step ------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        """Decides which units this step completes: whole chunks join until a unit is large enough or the prompt
        ends."""
        self._step_started_us = now_us()
        for chunk in plan.chunks:
            shipment = self._shipments.get(chunk.key)
            if shipment is None:
                continue
            end = chunk.first_position + len(chunk.tokens)
            waiting = end - shipment.pushed_tokens
            enough = self._layout.unit_bytes(waiting, self._layout.num_layers) >= self._config.min_unit_bytes
            shipment.groups = {}
            if waiting > 0 and (enough or end >= shipment.num_tokens):
                for first, count in plan_units(waiting, self._layout, self._config.min_unit_bytes):
                    shipment.groups[first + count - 1] = (end, first, count)

    def layer_done(self, plan: StepPlan, layer: int) -> None:
        """Pushes the layer groups that end with `layer`: their KV is final for every token of the step."""
        self._last_layer_us = now_us()
        for chunk in plan.chunks:
            shipment = self._shipments.get(chunk.key)
            group = shipment.groups.get(layer) if shipment is not None else None
            if shipment is not None and group is not None:
                end, first, count = group
                start = shipment.pushed_tokens
                self._sender.push(TransferKey(*shipment.key), chunk.tables, start, end - start, first, count)

    def computed(self, plan: StepPlan) -> None:
        """Notes the chunk times."""
        ended_us = now_us()
        for chunk in plan.chunks:
            self._note_chunk(chunk, ended_us)

    def _note_chunk(self, chunk: Chunk, ended_us: int) -> None:
        shipment = self._shipments.get(chunk.key)
        if shipment is None:
            return
        shipment.computed_tokens = chunk.first_position + len(chunk.tokens)
        if shipment.groups:
            shipment.pushed_tokens, shipment.groups = shipment.computed_tokens, {}
        times = (self._step_started_us, self._last_layer_us, ended_us)
        shipment.chunks.append((chunk.first_position, len(chunk.tokens), *times))

    def stepped(self, result: StepResult) -> None:
        """Hands over every prompt whose first token has been sampled."""
        for key, facts in result.explains:
            if key in self._shipments:
                self._shipments[key].facts = facts
        for output in result.outputs:
            shipment = self._shipments.get(output.key)
            if shipment is not None:
                meta = HandOff(output.token, output.position, shipment.num_tokens, output.logprobs)
                self._sender.finish(TransferKey(*output.key), HANDOFF_CODEC.encode(meta))

    # --- the transfer's end -----------------------------------------------------------------------------------------

    def transfer(self, event: SenderEvent) -> None:
        """Ends a shipment: adopted or failed. A grant needs nothing here."""
        if not isinstance(event, Adopted | TransferFailed):
            return
        key = StreamKey(*event.key)
        shipment = self._shipments.pop(key, None)
        if shipment is None:
            return
        self._engine.release(key)
        if isinstance(event, TransferFailed):
            self.desk.fail(key, "peer_lost" if event.reason == "peer_lost" else "transfer", "transfer")
            return
        if shipment.is_explained:
            self.desk.explain(key, _to_json, explain_facts(shipment, event.trace))
        self.desk.finish(key, PrefillEnd(key.stream, key.attempt, timings(shipment, event.trace)))


def timings(shipment: Shipment, trace: SendTrace) -> PrefillTimings:
    """The figures of one adopted shipment. Pure but for the clock that dates ADOPTED."""
    started, written, ended = shipment.chunks[0][2], shipment.chunks[-1][3], shipment.chunks[-1][4]
    return PrefillTimings(
        queued_us=max(0, started - shipment.accepted_us),
        compute_us=max(0, ended - started),
        num_chunks=len(shipment.chunks),
        num_units=len(trace.units),
        sent_bytes=sum(unit.num_bytes for unit in trace.units),
        hidden_bytes=sum(unit.num_bytes for unit in trace.units if unit.sent_us <= written),
        exposed_us=max(0, now_us() - ended),
        prompt_tokens=shipment.computed_tokens - shipment.num_cached,
    )


def explain_facts(shipment: Shipment, trace: SendTrace) -> dict[str, object]:
    return {
        "chunks": shipment.chunks,
        "units": [
            (u.first_token, u.num_tokens, u.first_layer, u.num_layers, u.num_bytes, u.pushed_us, u.sent_us)
            for u in trace.units
        ],
        "first_token": shipment.facts,
    }


def _to_json(facts: dict[str, object]) -> bytes:
    return json.dumps(facts).encode()
