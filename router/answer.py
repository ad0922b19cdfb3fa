"""The text side of a live stream: token ids in, text that may leave out, and why it ended.

Knows the detokenizer and stop strings. A consumer that is slow finds more ids at its next turn, and nothing else piles
up.
"""

from collections.abc import AsyncIterator, Collection

from router.errors import ApiError
from router.stream import LiveStream
from router.text.detokenizer import Detokenizer
from router.text.stop import StopMatcher
from workers.protocol import FinishReason


class Answer:
    """One consumer. After `pieces` ends, `reason` and `num_tokens` are final."""

    def __init__(
        self, stream: LiveStream, detokenizer: Detokenizer, stop: StopMatcher, eos_ids: Collection[int]
    ) -> None:
        self._stream, self._detokenizer, self._stop = stream, detokenizer, stop
        self._eos_ids = frozenset(eos_ids)
        self.num_tokens = 0
        """Tokens consumed: those after a stop string are not counted."""
        self.reason: FinishReason | None = None

    @property
    def is_stopped(self) -> bool:
        """A stop string ended the answer; the workers may not know it yet."""
        return self._stop.is_matched

    async def pieces(self) -> AsyncIterator[str]:
        """Text as it may leave, never empty. Raises `ApiError` where the stream ends in one. Cancel-safe."""
        while self.reason is None:
            await self._stream.wait_beyond(self.num_tokens)
            text = self._take()
            outcome = self._stream.outcome
            if self.is_stopped:
                self.reason = "stop"
            elif outcome is not None and self.num_tokens == len(self._stream.tokens):
                if isinstance(outcome, ApiError):
                    if text:
                        yield text
                    raise outcome
                text += self._stop.flush()
                self.reason = outcome.reason
            if text:
                yield text

    def _take(self) -> str:
        text = ""
        for token in self._stream.tokens[self.num_tokens :]:
            self.num_tokens += 1
            if token not in self._eos_ids:
                text += self._stop.push(self._detokenizer.push(token))
            if self._stop.is_matched:
                break
        return text
