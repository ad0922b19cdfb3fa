"""Which KV heads travel from which prefill rank to which decode rank, for any two degrees of tensor parallelism.

Pure arithmetic: no torch, no sockets. Both ends derive the same plan from three numbers, (num_kv_heads, prefill TP,
decode TP), so nothing is negotiated; the handshake compares `ReshardPlan.digest`.

    owned_heads   rank r of p holds heads [rH/p, (r+1)H/p), rounded down: uneven slices where p does not divide H,
                  and one head on several ranks where p > H
    source        the k-th of the decode ranks that hold a head takes it from a prefill rank that holds it, chosen so
                  that the replicas on one side spread over those on the other

A pair of ranks is joined by at most one run: a rank that holds several heads is the only one to hold each of them. So
a lane carries one slice of heads, and every unit on it is `[num_layers, 2, run.num_heads, num_tokens, head_dim]`.
Multi-head latent attention is num_kv_heads = 1: the whole latent goes to every decode rank.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.layout import MIN_UNIT_BYTES, KVLayout, plan_units


@dataclass(frozen=True, slots=True)
class HeadRun:
    """`num_heads` heads from `source_offset` on of prefill rank `source` are those from `target_offset` on of decode
    rank `target`; offsets count the heads that the rank itself holds."""

    source: int
    target: int
    source_offset: int
    target_offset: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Every (decode rank, head) is covered by exactly one run. Runs are sorted by (target, source)."""

    num_kv_heads: int
    source_tp: int
    target_tp: int
    runs: tuple[HeadRun, ...]

    @property
    def digest(self) -> str:
        """Equal exactly for equal plans: what the two ends compare before a unit travels."""
        rows = [dataclasses.astuple(run) for run in self.runs]
        return hashlib.sha256(repr((self.num_kv_heads, self.source_tp, self.target_tp, rows)).encode()).hexdigest()

    def runs_from(self, source: int) -> tuple[HeadRun, ...]:
        """What a prefill rank sends; nothing where others hold its heads too and were chosen."""
        return tuple(run for run in self.runs if run.source == source)

    def runs_to(self, target: int) -> tuple[HeadRun, ...]:
        """What a decode rank receives: one lane each."""
        return tuple(run for run in self.runs if run.target == target)

    def count_units(
        self, chunks: Sequence[int], layout: KVLayout, min_unit_bytes: int = MIN_UNIT_BYTES
    ) -> dict[tuple[int, int], int]:
        """Units that each (source, target) lane carries for chunks of so many tokens; pairs without a lane are absent.

        `layout` is the receiving replica's, whole. A lane of fewer heads joins more layers in a unit.
        """
        of_heads = {
            count: sum(
                len(plan_units(chunk, dataclasses.replace(layout, num_kv_heads=count), min_unit_bytes))
                for chunk in chunks
            )
            for count in {run.num_heads for run in self.runs}
        }
        return {(run.source, run.target): of_heads[run.num_heads] for run in self.runs}


def owned_heads(rank: int, tp: int, num_kv_heads: int) -> range:
    """The heads that rank `rank` of `tp` holds, at least one."""
    first = rank * num_kv_heads // tp
    return range(first, max(first + 1, (rank + 1) * num_kv_heads // tp))


@functools.cache
def plan_reshard(num_kv_heads: int, source_tp: int, target_tp: int) -> ReshardPlan:
    """The plan of a prefill replica of `source_tp` ranks and a decode replica of `target_tp`."""
    assert min(num_kv_heads, source_tp, target_tp) > 0, "a replica has a rank and a rank a head"
    runs: list[HeadRun] = []
    for target in range(target_tp):
        owned = owned_heads(target, target_tp, num_kv_heads)
        for head in owned:
            source = _source_of(head, target, num_kv_heads, source_tp, target_tp)
            source_offset = head - owned_heads(source, source_tp, num_kv_heads).start
            last = runs[-1] if runs else None
            if last is not None and (last.source, last.target) == (source, target):
                runs[-1] = dataclasses.replace(last, num_heads=last.num_heads + 1)
            else:
                runs.append(HeadRun(source, target, source_offset, head - owned.start, 1))
    return ReshardPlan(num_kv_heads, source_tp, target_tp, tuple(runs))


def _source_of(head: int, target: int, num_kv_heads: int, source_tp: int, target_tp: int) -> int:
    """The prefill rank from which decode rank `target` takes `head`."""
    sources, targets = _holders(head, source_tp, num_kv_heads), _holders(head, target_tp, num_kv_heads)
    place = targets.index(target)
    if len(sources) >= len(targets):
        return sources[place * len(sources) // len(targets)]
    return sources[place % len(sources)]


@functools.cache
def _holders(head: int, tp: int, num_kv_heads: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(tp) if head in owned_heads(rank, tp, num_kv_heads))
