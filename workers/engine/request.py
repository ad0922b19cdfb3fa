"""One attempt of one stream inside the engine: its tokens, how far they are computed, its blocks and its status.

Known tokens are the prompt, the output tokens of earlier attempts, and what was sampled here. `computed` counts the
known tokens whose KV cache is in `tables`. A step computes the difference; that is all there is to prefill and decode.
"""

from dataclasses import dataclass, field
from typing import Literal

from workers.protocol import PRIORITY_S, SamplingParams, StreamKey

Status = Literal["new", "reserved", "running", "preempted", "held", "finished", "released"]
Event = Literal["reserve", "start", "adopt", "preempt", "readmit", "hold", "finish", "release"]
Reason = Literal["routine", "local", "resume", "preempt", "fallback"]

TRANSITIONS: dict[tuple[Status, Event], Status] = {
    ("new", "reserve"): "reserved",
    ("reserved", "start"): "running",
    ("reserved", "adopt"): "running",
    ("running", "preempt"): "preempted",
    ("preempted", "readmit"): "running",
    ("running", "hold"): "held",
    ("running", "finish"): "finished",
    ("reserved", "release"): "released",
    ("running", "release"): "released",
    ("preempted", "release"): "released",
    ("held", "release"): "released",
}


class UnexpectedEvent(Exception):
    """An event that this status does not know: a bug of the caller, with the request's story."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Made by a role, then owned by the engine; fields are read by anyone on the engine thread and written by the
    engine.
    """

    key: StreamKey
    known: list[int]
    """Token ids: prompt, emitted earlier, sampled here."""
    num_prompt: int
    num_emitted: int = 0
    """Output tokens of earlier attempts, part of `known` from the start."""
    sampling: SamplingParams
    tenant: bytes = b""
    """Whose cached prefixes it shares."""
    priority: int = 0
    """Higher goes first."""
    computed: int = 0
    """Known tokens whose KV cache is in `tables`, as far as a later token sees it."""
    adopts: bool = False
    """Decode role: the KV cache comes by transfer; only what the first decode step sees is given blocks."""
    tables: list[list[int]] = field(default_factory=list)
    """Block tables, one per state group: page p holds tokens p x block_tokens and following. NULL_BLOCK where a window
    slid past."""
    num_pages: int = 0
    """Pages that it may fill: the length of the tables of groups without a window."""
    num_slid: list[int] = field(default_factory=list)
    """Per group the pages that a window slid past."""
    num_promised: int = 0
    """Blocks that it may hold at the same time in groups with a window."""
    names: list[bytes] = field(default_factory=list)
    """Names of the first full blocks of `known`, as far as anybody asked."""
    num_entered: int = 0
    """Pages that came from the prefix cache or were entered into it."""
    num_cached: int = 0
    """Known tokens that the cache held when the request was reserved."""
    status: Status = "new"
    hold_after_prompt: bool = False
    """Prefill role: keep the blocks and stop once the first token is sampled."""
    reason: Reason = "routine"
    """Why tokens below `catch_up_to` are computed here."""
    explain: bool = False
    arrival: float = 0.0
    """Seconds of the engine's clock."""
    catch_up_to: int = 0
    """Known tokens below this count are computed as prompt; above it they are decode steps."""
    story: list[Event] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Move to the next status; raises `UnexpectedEvent` for a pair that `TRANSITIONS` does not list."""
        after = TRANSITIONS.get((self.status, event))
        if after is None:
            raise UnexpectedEvent(
                f"{self.key!r} is {self.status} and cannot {event}; so far: {' '.join(self.story) or 'nothing'}"
            )
        self.status = after
        self.story.append(event)

    @property
    def seniority(self) -> float:
        """Smaller goes first and is preempted last: time of arrival, a level of priority counting as PRIORITY_S of
        waiting."""
        return self.arrival - PRIORITY_S * self.priority

    @property
    def num_outputs(self) -> int:
        """Output tokens known, those of earlier attempts included: the position of the next one."""
        return len(self.known) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.known) - self.computed

    @property
    def is_prompt_left(self) -> bool:
        """Whether the next token to compute is a prompt token (or one that preemption made us compute again)."""
        return self.computed < self.catch_up_to
