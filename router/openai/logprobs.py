"""Log probabilities as the two endpoints write them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedLogprob:
    """A token's bytes, which may be part of a character, and its log probability."""

    raw: bytes
    logprob: float

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of the answer and the likeliest ones at its place."""

    chosen: NamedLogprob
    top: tuple[NamedLogprob, ...]


def describe_chat(entries: Sequence[TokenEntry]) -> dict[str, object]:
    """`choices[].logprobs` of chat completions."""
    return {
        "content": [
            _describe(entry.chosen) | {"top_logprobs": [_describe(one) for one in entry.top]} for entry in entries
        ],
        "refusal": None,
    }


def _describe(one: NamedLogprob) -> dict[str, object]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.raw)}


def describe_completion(entries: Sequence[TokenEntry], offset: int) -> dict[str, object]:
    """`choices[].logprobs` of text completions; `offset`: characters of the tokens before."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.chosen.text)
    return {
        "tokens": [entry.chosen.text for entry in entries],
        "token_logprobs": [entry.chosen.logprob for entry in entries],
        "top_logprobs": [{one.text: one.logprob for one in entry.top} for entry in entries],
        "text_offset": offsets,
    }
