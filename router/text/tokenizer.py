"""A model's tokenizer from its local folder: text to ids, ids to bytes, chat messages to a prompt.

Uses the `tokenizers` library on tokenizer.json itself: transformers' wrapper would load torch into the ingress. Every
method may be called from any thread; `encode` releases the interpreter while it works, so callers run it off the event
loop.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer as Backend

from router.text.detokenizer import Detokenizer
from router.text.templates import ChatTemplate

VocabularyKind = Literal["byte_level", "byte_fallback"]


def _read_json(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return document


def _text_of(token: object) -> str | None:
    """A special token stands as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def _kinds(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders")
    return {str(decoder.get("type"))} | {k for d in (inner if isinstance(inner, list) else []) for k in _kinds(d)}


def find_vocabulary_kind(document: Mapping[str, object]) -> VocabularyKind:
    """How ids of this tokenizer.json map to bytes. Raises ValueError for kinds that we cannot stream."""
    kinds = _kinds(document.get("decoder"))
    if "ByteLevel" in kinds:
        return "byte_level"
    if "ByteFallback" in kinds:
        return "byte_fallback"
    raise ValueError(f"tokenizer decoder {sorted(kinds)} is not served: expected ByteLevel or ByteFallback")


class Tokenizer:
    """Immutable after construction. Raises ValueError when the folder holds no tokenizer that we can stream."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{path} does not exist: the model folder needs a tokenizer.json")
        document = _read_json(path)
        self._backend = Backend.from_str(path.read_text(encoding="utf-8"))
        self._kind = find_vocabulary_kind(document)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = document.get("added_tokens")
        self._special = {t["id"] for t in (added if isinstance(added, list) else []) if t.get("special")}
        self._bytes = self._make_byte_table()
        settings = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = {
            key: text
            for key, value in settings.items()
            if key.endswith("_token") and (text := _text_of(value)) is not None
        }
        self.eos_ids = self._find_eos_ids(folder)
        self.template = self._load_template(folder, settings)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def piece(self, token: int) -> str:
        """The bytes of an id as text for people: half characters show as U+FFFD, special tokens by name."""
        if token in self._special:
            return str(self._backend.id_to_token(token))
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What an id adds to the text; empty for special tokens and for ids without an entry."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def make_detokenizer(self) -> Detokenizer:
        return Detokenizer(self.token_bytes, strip_first_space=self._kind == "byte_fallback")

    def _make_byte_table(self) -> list[bytes]:
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        alphabet = _byte_of_char()
        for piece, token in vocab.items():
            if token in self._special:
                continue
            if self._kind == "byte_fallback":
                is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
                table[token] = bytes([int(piece[3:5], 16)]) if is_byte else piece.replace("\u2581", " ").encode()
            elif all(char in alphabet for char in piece):
                table[token] = bytes(alphabet[char] for char in piece)
            else:
                table[token] = piece.encode()
        return table

    def _find_eos_ids(self, folder: Path) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            found = _read_json(folder / name).get("eos_token_id")
            listed = found if isinstance(found, list) else [found]
            ids = [i for i in listed if isinstance(i, int)]
            if ids:
                break
        by_name = self._backend.token_to_id(self.special_tokens.get("eos_token", ""))
        if by_name is not None:
            ids.append(by_name)
        return tuple(dict.fromkeys(ids))

    def _load_template(self, folder: Path, settings: Mapping[str, object]) -> ChatTemplate | None:
        path = folder / "chat_template.jinja"
        source: object = path.read_text(encoding="utf-8") if path.exists() else settings.get("chat_template")
        if isinstance(source, Sequence) and not isinstance(source, str):
            named = {t["name"]: t["template"] for t in source if isinstance(t, dict)}
            source = named.get("default")
        return ChatTemplate(source, self.special_tokens) if isinstance(source, str) else None
