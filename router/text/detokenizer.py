"""Token ids to text, one id at a time, never half a character. Pure.

Byte-level and byte-fallback vocabularies map each id to bytes; a character may span ids. Bytes that can start no
character become U+FFFD at once, as in a full decode; bytes that may still grow into one are held, and dropped when
nothing follows.
"""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Incremental: the concatenation of every `push` equals the full decode minus an incomplete last character."""

    def __init__(self, token_bytes: Callable[[int], bytes], strip_first_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = strip_first_space

    def push(self, token: int) -> str:
        """The text that this id completes; may be empty."""
        text = self._decoder.decode(self._token_bytes(token))
        if text and self._strip_next:
            self._strip_next = False
            text = text.removeprefix(" ")
        return text
