"""What a checked request asks for, whichever endpoint it came through, and the shape its answer takes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from router.openai.logprobs import TokenEntry
from router.openai.sampling import SamplingAsk
from workers.protocol import FinishReason


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages as the chat template takes them: dicts with `role` and `content`."""

    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Ids chosen by the client; checked against the vocabulary before use."""

    tokens: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request whose every field is in range; only facts of the model and the pools are still unchecked."""

    endpoint: Literal["chat", "completions"]
    prompt: Prompt
    max_tokens: int | None
    """What the client asked for; None: `default_max_tokens`."""
    default_max_tokens: int | None
    """Cut to what the context allows; None: as many as it allows."""
    max_tokens_param: str
    """The name under which the client gave it, for error messages."""
    sampling: SamplingAsk
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    num_choices: int = 1
    """Answers to the one prompt, each drawn apart."""
    priority: int = 0
    """Higher goes first."""
    tenant: bytes = b""
    """Whose cached prefixes may be used; digest of the client's salt."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may leave, and the log probabilities of the tokens consumed for it where the client asked."""

    text: str
    entries: tuple[TokenEntry, ...] = ()


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    return Piece("".join(piece.text for piece in pieces), tuple(entry for piece in pieces for entry in piece.entries))


class ReplyShape(Protocol):
    """Turns text and outcomes into the documents of one endpoint. One object per request; keeps what was said
    already.
    """

    def whole(self, choices: Sequence[tuple[Piece, FinishReason]], usage: Usage) -> dict[str, object]: ...

    def chunk(self, index: int, piece: Piece) -> dict[str, object]: ...

    def finish(self, index: int, reason: FinishReason) -> dict[str, object]: ...

    def usage(self, usage: Usage) -> dict[str, object]: ...
