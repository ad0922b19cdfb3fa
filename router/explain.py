"""POST /baton/explain: one chat request on the running workers, and a JSON document of everything that happened to it.

The document is informational and for `baton explain`; its parts come from the tokenizer, config.json, the stream's
marks and what the workers say about themselves. Loads no model.
"""

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from router.context import Trail, elapsed_ms
from router.dispatcher import Dispatcher
from router.exchange import Exchange
from router.openai.ask import Ask
from router.pipeline import Pipeline
from router.status import describe_worker
from router.stream import LiveStream
from router.text.tokenizer import Tokenizer

PREFILL_WAIT_S = 1.0
"""Prefill's timings may come after the last token of a short answer."""


class Explainer:
    """One per ingress. `config.json` is read once, at construction."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, dispatcher: Dispatcher, pipeline: Pipeline) -> None:
        self._tokenizer, self._dispatcher, self._pipeline = tokenizer, dispatcher, pipeline
        path = folder / "config.json"
        self._facts: object = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    async def reply(self, exchange: Exchange, ask: Ask, stream: LiveStream, trail: Trail) -> None:
        """Waits for the whole answer and sends the document. Raises `ApiError` where the stream ends in one."""
        answer = self._pipeline.listen(ask, stream, trail)
        text = "".join([piece.text async for piece in answer.pieces()])
        try:
            async with asyncio.timeout(PREFILL_WAIT_S):
                await stream.wait_prefill_end()
        except TimeoutError:
            pass
        document = self._describe(stream, trail) | {"text": text, "finish_reason": answer.reason}
        await exchange.send_json(200, document)

    def _describe(self, stream: LiveStream, trail: Trail) -> dict[str, object]:
        place = stream.placement
        workers = {w.incarnation: describe_worker(w) for w in self._dispatcher.snapshots()}
        facts = _collect_facts(stream)
        return {
            "request": {
                "id": trail.request,
                "stream": stream.id.hex(),
                "retries": stream.num_retries,
                "local": place.local,
            },
            "prompt": {
                "rendered": trail.rendered,
                "tokens": self._pieces(trail.prompt),
                "cached_tokens": stream.num_cached,
            },
            "model": {
                "config": self._facts,
                "vocab_size": self._tokenizer.vocab_size,
                "eos_ids": self._tokenizer.eos_ids,
            },
            "sampling": dataclasses.asdict(stream.sampling),
            "first_token": self._name_candidates(find_first_token(facts)),
            "output": self._describe_output(stream, trail.arrived),
            "timings": _describe_times(stream, trail),
            "facts": facts,
            "workers": {"prefill": workers.get(place.prefill or 0), "decode": workers.get(place.decode)},
        }

    def _pieces(self, tokens: Sequence[int]) -> list[dict[str, object]]:
        return [{"id": token, "piece": self._tokenizer.piece(token)} for token in tokens]

    def _describe_output(self, stream: LiveStream, arrived: float) -> list[dict[str, object]]:
        """Per token: its piece, the text that the detokenizer let go with it, and when it arrived."""
        times = stream.explain.token_times if stream.explain else []
        detokenizer = self._tokenizer.make_detokenizer()
        rows: list[dict[str, object]] = []
        for piece, token, at in zip(self._pieces(stream.tokens), stream.tokens, times, strict=True):
            rows.append(piece | {"text": detokenizer.push(token), "at_ms": elapsed_ms(arrived, at)})
        return rows

    def _name_candidates(self, facts: dict[str, object] | None) -> dict[str, object] | None:
        """Adds the piece to each candidate, so that the reader needs no tokenizer."""
        if facts is None:
            return None
        named = dict(facts)
        for key in ("before", "after"):
            rows = facts.get(key)
            if isinstance(rows, list):
                named[key] = [row | {"piece": self._tokenizer.piece(row["token"])} for row in rows]
        return named


def _collect_facts(stream: LiveStream) -> dict[str, dict[str, object]]:
    """What each role said, newest wins per key."""
    facts: dict[str, dict[str, object]] = {}
    for message in stream.explain.facts if stream.explain else []:
        said = json.loads(message.facts)
        if isinstance(said, dict):
            facts.setdefault(message.role, {}).update(said)
    return facts


def find_first_token(facts: dict[str, dict[str, object]]) -> dict[str, object] | None:
    """The draw of the first token, from whichever worker made it."""
    first = facts.get("prefill", {}).get("first_token")
    if isinstance(first, dict):
        return first
    for role in ("decode", "colocated"):
        rows = facts.get(role, {}).get("tokens")
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return rows[0]
    return None


def _describe_times(stream: LiveStream, trail: Trail) -> dict[str, object]:
    marks, times = stream.marks, stream.explain.token_times if stream.explain else []
    return {
        "tokenize_ms": elapsed_ms(trail.arrived, trail.tokenized),
        "queue_ms": elapsed_ms(marks.queued, marks.dispatched),
        "decode_grant_ms": elapsed_ms(marks.dispatched, marks.decode_accepted),
        "prefill_grant_ms": elapsed_ms(marks.decode_accepted, marks.prefill_accepted),
        "ttft_ms": elapsed_ms(trail.arrived, marks.first_token),
        "itl_ms": [elapsed_ms(before, after) for before, after in itertools.pairwise(times)],
        "decode_ms": elapsed_ms(marks.first_token, marks.last_token),
        "total_ms": elapsed_ms(trail.arrived, marks.ended),
        "prefill": dataclasses.asdict(stream.prefill_timings) if stream.prefill_timings else None,
        "decode": dataclasses.asdict(stream.decode_timings) if stream.decode_timings else None,
    }
