"""The text side of a live stream: token ids in, text that may leave out, and why it ended.

Knows the detokenizer and stop strings. A consumer that is slow finds more ids at its next turn, and nothing else piles
up.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from router.errors import ApiError
from router.openai.ask import Piece
from router.openai.logprobs import NamedLogprob, TokenEntry
from router.stream import LiveStream
from router.text.detokenizer import Detokenizer
from router.text.stop import StopMatcher
from workers.protocol import FinishReason, Logprobs


class TextSource(Protocol):
    """What turns ids into text."""

    def make_detokenizer(self) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes: ...


class Answer:
    """One consumer. After `pieces` ends, `reason` and `num_tokens` are final."""

    def __init__(self, stream: LiveStream, source: TextSource, stop: StopMatcher) -> None:
        self._stream, self._source, self._stop = stream, source, stop
        self._detokenizer = source.make_detokenizer()
        self._eos_ids = frozenset(stream.sampling.stop_token_ids)
        self.num_tokens = 0
        """Tokens consumed: those after a stop string are not counted."""
        self._num_told = 0
        self.reason: FinishReason | None = None

    @property
    def is_stopped(self) -> bool:
        """A stop string ended the answer; the workers may not know it yet."""
        return self._stop.is_matched

    async def pieces(self) -> AsyncIterator[Piece]:
        """What may leave, never empty. Raises `ApiError` where the stream ends in one. Cancel-safe."""
        while self.reason is None:
            await self._stream.wait_beyond(self.num_tokens)
            text = self._take()
            outcome = self._stream.outcome
            if self.is_stopped:
                self.reason = "stop"
            elif outcome is not None and self.num_tokens == len(self._stream.tokens):
                if isinstance(outcome, ApiError):
                    if text:
                        yield Piece(text, self._tell())
                    raise outcome
                text += self._stop.flush()
                self.reason = outcome.reason
            entries = self._tell() if text or self.reason is not None else ()
            if text or entries:
                yield Piece(text, entries)

    def _take(self) -> str:
        text, least = "", self._stream.sampling.min_tokens
        for token in self._stream.tokens[self.num_tokens :]:
            self.num_tokens += 1
            if token not in self._eos_ids:
                piece = self._detokenizer.push(token)
                text += self._stop.push(piece) if self.num_tokens > least else piece
            if self._stop.is_matched:
                break
        return text

    def _tell(self) -> tuple[TokenEntry, ...]:
        """Entries of the tokens consumed since the last call, but for what ends the text."""
        first, self._num_told = self._num_told, self.num_tokens
        told = zip(
            self._stream.tokens[first : self.num_tokens], self._stream.logprobs[first : self.num_tokens], strict=False
        )
        return tuple(self._name(token, logprobs) for token, logprobs in told if token not in self._eos_ids)

    def _name(self, token: int, logprobs: Logprobs) -> TokenEntry:
        top = tuple(NamedLogprob(self._source.token_bytes(one.token), one.logprob) for one in logprobs.top)
        return TokenEntry(NamedLogprob(self._source.token_bytes(token), logprobs.chosen), top)
