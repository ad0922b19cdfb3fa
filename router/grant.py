"""The two questions of a grant, as messages: GENERATE to decode, PREFILL to prefill. Pure."""

from router.stream import LiveStream
from workers.protocol import Generate, Prefill, pack_tokens

MAX_MS = 86_400_000


def _milliseconds(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), MAX_MS)


def make_generate(stream: LiveStream, dispatch: int, now: float) -> Generate:
    """Asks the stream's decode worker to reserve and to wait for its prefill, or to compute the prompt itself."""
    place, due = stream.placement, stream.deadlines
    return Generate(
        stream=stream.id,
        attempt=stream.attempt,
        dispatch=dispatch,
        waited_ms=_milliseconds(stream.waited_s(now)),
        source=place.prefill or 0,
        local=place.local,
        prompt=stream.packed_prompt,
        emitted=pack_tokens(stream.tokens),
        sampling=stream.sampling,
        first_token_ms=_milliseconds(due.first_token_at - now),
        progress_ms=_milliseconds(due.progress_s),
        explain=stream.explain is not None,
        tenant=stream.standing.tenant,
        priority=stream.standing.priority,
    )


def make_prefill(stream: LiveStream, dispatch: int, skip_tokens: int, now: float) -> Prefill:
    """Asks the stream's prefill worker to compute all but `skip_tokens` of the prompt and to ship it to decode."""
    return Prefill(
        stream=stream.id,
        attempt=stream.attempt,
        dispatch=dispatch,
        waited_ms=_milliseconds(stream.waited_s(now)),
        decode=stream.placement.decode,
        skip_tokens=skip_tokens,
        prompt=stream.packed_prompt,
        emitted=pack_tokens(stream.tokens),
        sampling=stream.sampling,
        first_token_ms=_milliseconds(stream.deadlines.first_token_at - now),
        explain=stream.explain is not None,
        tenant=stream.standing.tenant,
        priority=stream.standing.priority,
    )
