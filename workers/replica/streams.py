"""The attempts a worker serves, by stream and by ingress: fences, deadlines, what is kept until SEEN. Pure.

Knows no engine and no socket. An entry lives from ACCEPT until its END or FAILED has been SEEN (or forgotten after
RETENTION_S); an abort removes it at once, for then nothing is owed.

    live  --finish()-->  ended  --seen() | retention-->  gone
      `------abort, superseded, ingress lost------------^
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from workers.protocol import (
    Delta,
    End,
    Failed,
    Logprobs,
    Position,
    PrefillEnd,
    Resume,
    Stage,
    StreamKey,
    Tokens,
    UpMessage,
)

INGRESS_GRACE_S = 2.0
RETENTION_S = 60.0


@dataclass(slots=True)
class Attempt:
    """One attempt of one stream at this worker."""

    key: StreamKey
    ingress: int
    base: int
    """Output tokens emitted by earlier attempts."""
    deadline: float
    """Monotonic seconds by which the next token (or ADOPTED) is due."""
    progress_s: float
    accept: UpMessage
    outputs: list[int] = field(default_factory=list)
    """Output tokens of this attempt: position base onwards."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """One per output token where the stream asks for them, else empty."""
    final: End | Failed | PrefillEnd | None = None
    ended_at: float = 0.0

    def delta(self, count: int) -> Delta:
        """Every output token from position `count` on."""
        start = max(count, self.base)
        first = start - self.base
        return Delta(
            self.key.stream, self.key.attempt, start, tuple(self.outputs[first:]), tuple(self.logprobs[first:])
        )


class StreamTable:
    """All attempts of one worker, which serves `stage`. One caller: the engine thread."""

    def __init__(self, stage: Stage) -> None:
        self._stage: Stage = stage
        self._attempts: dict[bytes, Attempt] = {}
        self._down_since: dict[int, float] = {}

    def get(self, key: StreamKey) -> Attempt | None:
        attempt = self._attempts.get(key.stream)
        return attempt if attempt is not None and attempt.key == key else None

    def live(self) -> list[Attempt]:
        return [a for a in self._attempts.values() if a.final is None]

    def older_than(self, key: StreamKey) -> Attempt | None:
        """The entry that a new attempt `key` supersedes."""
        attempt = self._attempts.get(key.stream)
        return attempt if attempt is not None and attempt.key.attempt < key.attempt else None

    def is_stale(self, key: StreamKey) -> bool:
        attempt = self._attempts.get(key.stream)
        return attempt is not None and attempt.key.attempt > key.attempt

    def add(self, attempt: Attempt) -> None:
        assert attempt.key.stream not in self._attempts, f"{attempt.key} is served already"
        self._attempts[attempt.key.stream] = attempt

    def remove(self, key: StreamKey) -> Attempt | None:
        attempt = self.get(key)
        if attempt is not None:
            del self._attempts[key.stream]
        return attempt

    def finish(self, key: StreamKey, final: End | Failed | PrefillEnd, now: float) -> Attempt | None:
        """Marks the one terminal answer of an attempt; None when there is none live."""
        attempt = self.get(key)
        if attempt is None or attempt.final is not None:
            return None
        attempt.final, attempt.ended_at = final, now
        return attempt

    def resume(self, ingress: int, message: Resume) -> tuple[list[Attempt], list[UpMessage]]:
        """What a RESUME asks for: (attempts to abort, messages to send again)."""
        named = {p.stream: p for p in message.positions}
        doomed = [
            a for a in self._attempts.values() if message.complete and a.ingress == ingress and not _is_named(a, named)
        ]
        answers: list[UpMessage] = []
        for position in message.positions:
            answers.extend(self._again(ingress, position))
        return doomed, answers

    def _again(self, ingress: int, position: Position) -> Iterator[UpMessage]:
        attempt = self.get(StreamKey(position.stream, position.attempt))
        if attempt is None or attempt.ingress != ingress:
            yield Failed(position.stream, position.attempt, self._stage, "unknown")
            return
        yield attempt.accept
        delta = attempt.delta(position.count)
        if delta.tokens:
            yield Tokens((delta,))
        if attempt.final is not None:
            yield attempt.final

    def overdue(self, now: float) -> list[Attempt]:
        return [a for a in self._attempts.values() if a.final is None and now >= a.deadline]

    def link_up(self, ingress: int) -> None:
        self._down_since.pop(ingress, None)

    def link_down(self, ingress: int, now: float) -> None:
        self._down_since.setdefault(ingress, now)

    def orphans(self, now: float) -> list[Attempt]:
        """Attempts whose ingress has been gone for the grace time; that ingress is then forgotten."""
        lost = {i for i, since in self._down_since.items() if now - since >= INGRESS_GRACE_S}
        for ingress in lost:
            del self._down_since[ingress]
        return [a for a in self._attempts.values() if a.ingress in lost] if lost else []

    def forget_old(self, now: float) -> None:
        """Drops ended attempts whose SEEN never came."""
        for key in [a.key for a in self._attempts.values() if a.final is not None and now - a.ended_at > RETENTION_S]:
            del self._attempts[key.stream]


def _is_named(attempt: Attempt, named: dict[bytes, Position]) -> bool:
    position = named.get(attempt.key.stream)
    return position is not None and position.attempt == attempt.key.attempt
