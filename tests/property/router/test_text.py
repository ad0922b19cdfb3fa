"""The detokenizer and the stop strings give the same text however the ids are cut."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.detokenizer import Detokenizer
from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import write_model_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model_folder(Path(tmp_path_factory.mktemp("model"))))


@given(text=st.text())
def test_encoded_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = tokenizer.make_detokenizer()
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(ids=st.lists(st.integers(0, 265)))
def test_any_ids_equal_the_full_decode_minus_an_incomplete_tail(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = tokenizer.make_detokenizer()
    said = "".join(detokenizer.push(token) for token in ids)
    full = tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert full.startswith(said)
    assert full[len(said) :] in ("", "\ufffd")


@given(data=st.binary(), cuts=st.lists(st.integers(0, 40)))
def test_bytes_cut_anywhere_give_one_text(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    parts = [data[a:b] for a, b in itertools.pairwise(edges)]
    whole, split = Detokenizer(lambda _: data), Detokenizer(parts.__getitem__)
    assert "".join(split.push(i) for i in range(len(parts))) == whole.push(0) if data else True


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    cut=st.integers(1, 5),
)
def test_stop_strings_do_not_depend_on_the_cut_and_never_leak(text: str, stops: list[str], cut: int) -> None:
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        expected, is_matched = text[: ends[0] - longest], True
    else:
        expected, is_matched = text, False
    matcher = StopMatcher(stops)
    said = ""
    for at in range(0, len(text), cut):
        said += matcher.push(text[at : at + cut])
        assert expected.startswith(said)
    if not matcher.is_matched:
        said += matcher.flush()
    assert (said, matcher.is_matched) == (expected, is_matched)
