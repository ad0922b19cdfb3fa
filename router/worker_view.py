"""What the ingress knows of its workers: immutable snapshots, and the choice of a route from them. Pure.

A snapshot is the worker's last LOAD plus what this ingress has sent since: a dispatch counts until a LOAD says it is
counted.
"""

import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from workers.pages import blocks_to_hold, count_pages
from workers.protocol import Load, LocalReason, Role, WorkerIdentity

WaitLabel = Literal["decode_blocks", "prefill_time", "no_decode_worker", "no_prefill_worker", "no_lane"]
KEEP_FREE = 0.02
"""Share of a decode pool that a grant leaves free."""
EQUAL_SHARE = 0.1
"""Decode workers whose shares of free blocks differ by no more count as equally loaded."""


def _no_names(block_tokens: int) -> Sequence[bytes]:
    return ()


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Work sent to a worker that its LOAD may not count yet."""

    number: int
    blocks: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    incarnation: int
    role: Role
    identity: WorkerIdentity | None
    """None until the first handshake."""
    load: Load | None
    """None until the first LOAD of this connection."""
    is_listed: bool
    is_suspect: bool
    is_refusing: bool
    """It answered BUSY and has sent no LOAD since."""
    pending: tuple[Dispatched, ...] = ()
    cached: Set[bytes] = frozenset()
    """Names of the blocks in its prefix cache, as far as it has said."""

    @property
    def can_serve(self) -> bool:
        """Connected, ready and heard of lately: it counts as capacity."""
        is_ready = self.identity is not None and self.load is not None and self.load.state == "ready"
        return is_ready and self.is_listed and not self.is_suspect

    @property
    def blocks_free(self) -> int:
        return self.load.blocks_free - sum(d.blocks for d in self._uncounted) if self.load else 0

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens + sum(d.prompt_tokens for d in self._uncounted) if self.load else 0

    @property
    def num_requests(self) -> int:
        return self.load.running + self.load.waiting + len(self._uncounted) if self.load else 0

    @property
    def _uncounted(self) -> tuple[Dispatched, ...]:
        counted = self.load.last_dispatch if self.load else 0
        return tuple(d for d in self.pending if d.number > counted)


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a route."""

    num_known: int
    """Prompt and emitted tokens."""
    num_remaining: int
    """Output tokens that may still come."""
    local: LocalReason = "none"
    """Not none: the decode worker computes the prompt itself."""
    avoid: Collection[int] = ()
    """Incarnations of prefill workers that failed it; taken only when there is no other."""
    names: Callable[[int], Sequence[bytes]] = _no_names
    """Names of the prompt's full blocks of so many tokens."""

    def num_blocks(self, identity: WorkerIdentity) -> int:
        """Blocks that a decode worker reserves: what is known, and headroom where more tokens may come."""
        known = count_pages(self.num_known, identity.block_tokens)
        possible = count_pages(self.num_known + self.num_remaining, identity.block_tokens) - known
        pages = known + min(identity.headroom_blocks, possible)
        return blocks_to_hold(pages, identity.windows, identity.block_tokens)

    def cached_tokens(self, worker: WorkerSnapshot) -> int:
        """Tokens of the prompt's beginning that the worker need not compute, as far as is known here."""
        if worker.identity is None or not worker.cached:
            return 0
        block_tokens = worker.identity.block_tokens
        names = self.names(block_tokens)
        return block_tokens * next((i for i, name in enumerate(names) if name not in worker.cached), len(names))


@dataclass(frozen=True, slots=True)
class Route:
    decode: int
    prefill: int | None
    """None: the prompt is computed where it is decoded."""
    local: LocalReason
    blocks: int
    """Blocks that the decode worker will reserve."""
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    label: WaitLabel


def pool_tokens(workers: Sequence[WorkerSnapshot]) -> int | None:
    """Tokens that the smallest sufficient route can hold: what the largest decode worker and, in pairs, the largest
    prefill worker take. A worker's pool holds a context of the length that it takes.
    """
    largest: dict[Role, int] = {}
    for worker in workers:
        if worker.identity is not None:
            largest[worker.role] = max(largest.get(worker.role, 0), worker.identity.max_context_tokens)
    return min(largest.values(), default=None)


def _can_hold(worker: WorkerSnapshot, need: Need) -> bool:
    """Whether the request fits the worker at all, with room for an output token."""
    return worker.identity is not None and need.num_known < worker.identity.max_context_tokens


def _has_blocks(worker: WorkerSnapshot, need: Need) -> bool:
    assert worker.identity is not None
    keep = math.ceil(KEEP_FREE * worker.identity.blocks_total)
    wanted = need.num_blocks(worker.identity)
    fits_only_alone = worker.num_requests == 0 and worker.blocks_free >= wanted
    return worker.blocks_free - wanted >= keep or fits_only_alone


def decide_route(
    workers: Sequence[WorkerSnapshot], need: Need, disaggregation: Literal["always", "never"], draw: Callable[[], float]
) -> Route | Wait:
    """Filter, order by load, draw between the best two (`draw` gives [0, 1)). A Wait names what the request waits
    for.
    """
    decode_role: Role = "decode" if disaggregation == "always" else "colocated"
    decodes = [w for w in workers if w.role == decode_role and w.can_serve]
    if not decodes:
        return Wait("no_decode_worker")
    open_decodes = [w for w in decodes if not w.is_refusing and _can_hold(w, need) and _has_blocks(w, need)]
    if not open_decodes:
        return Wait("decode_blocks")
    if disaggregation == "never" or need.local != "none":
        best = _pick_decode(open_decodes, need, draw)
        return _route(best, None, "local" if disaggregation == "never" else need.local, need, "computes its own prompt")
    return _decide_pair(workers, open_decodes, need, draw)


def _decide_pair(
    workers: Sequence[WorkerSnapshot], decodes: Sequence[WorkerSnapshot], need: Need, draw: Callable[[], float]
) -> Route | Wait:
    prefills = [w for w in workers if w.role == "prefill" and w.can_serve]
    if not prefills:
        return Wait("no_prefill_worker")
    trusted = [w for w in prefills if w.incarnation not in need.avoid] or prefills
    open_prefills = [w for w in trusted if not w.is_refusing and _can_hold(w, need)]
    if not open_prefills:
        return Wait("prefill_time")
    for prefill in _order_prefills(open_prefills, need, draw):
        reached = [d for d in decodes if d.load is not None and prefill.incarnation in d.load.open_lanes]
        if reached:
            decode = _pick_decode(reached, need, draw)
            return _route(
                decode, prefill.incarnation, "none", need, f"least loaded of {len(open_prefills)} x {len(reached)}"
            )
    return Wait("no_lane")


def _decode_order(worker: WorkerSnapshot) -> tuple[float, int]:
    return -_free_share(worker), worker.num_requests


def _free_share(worker: WorkerSnapshot) -> float:
    return worker.blocks_free / max(worker.identity.blocks_total, 1) if worker.identity else 0.0


def _pick_decode(workers: Sequence[WorkerSnapshot], need: Need, draw: Callable[[], float]) -> WorkerSnapshot:
    """Of those about as free as the freest the one with the longest cached prefix, else a draw of the best two."""
    ordered = sorted(workers, key=_decode_order)
    if len(ordered) == 1:
        return ordered[0]
    equals = [w for w in ordered if _free_share(ordered[0]) - _free_share(w) <= EQUAL_SHARE]
    longest = max(equals, key=need.cached_tokens)
    return longest if need.cached_tokens(longest) else _pick(ordered, draw)


def _order_prefills(
    workers: Sequence[WorkerSnapshot], need: Need, draw: Callable[[], float]
) -> Sequence[WorkerSnapshot]:
    """By the work that is done when this prompt is: queued and uncached tokens. A draw of the best two leads, unless
    one of them has more of the prompt cached."""
    if len(workers) == 1:
        return workers
    cached = {w.incarnation: need.cached_tokens(w) for w in workers}
    ordered = sorted(workers, key=lambda w: (w.queued_tokens - cached[w.incarnation], w.num_requests))
    first, second = ordered[:2]
    if cached[first.incarnation] != cached[second.incarnation]:
        return ordered
    best = _pick(ordered, draw)
    return [best, *(w for w in ordered if w is not best)]


def _pick(ordered: Sequence[WorkerSnapshot], draw: Callable[[], float]) -> WorkerSnapshot:
    return ordered[min(int(draw() * 2), 1, len(ordered) - 1)]


def _route(decode: WorkerSnapshot, prefill: int | None, local: LocalReason, need: Need, reason: str) -> Route:
    assert decode.identity is not None
    return Route(decode.incarnation, prefill, local, need.num_blocks(decode.identity), reason)
