"""One attempt of one stream inside the engine: its tokens, how far they are computed, its blocks and its status.

Known tokens are the prompt, the output tokens of earlier attempts, and what was sampled here. `computed` counts the
known tokens whose KV cache is in `blocks`. A step computes the difference; that is all there is to prefill and decode.
"""

from dataclasses import dataclass, field
from typing import Literal

from workers.protocol import SamplingParams, StreamKey

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


@dataclass(slots=True, kw_only=True)
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
    computed: int = 0
    """Known tokens whose KV cache is in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    status: Status = "new"
    hold_after_prompt: bool = False
    """Prefill role: keep the blocks and stop once the first token is sampled."""
    reason: Reason = "routine"
    """Why tokens below `catch_up_to` are computed here."""
    explain: bool = False
    arrival: float = 0.0
    """Seconds of the engine's clock; older requests go first and are preempted last."""
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
