"""Pages that a window sees, against counting them."""

from hypothesis import given
from hypothesis import strategies as st

from workers.pages import blocks_to_hold, count_pages, first_page_seen, most_pages


@given(window=st.integers(1, 40), num_tokens=st.integers(1, 20), size=st.integers(1, 9))
def test_most_pages_is_the_worst_place_to_stand(window: int, num_tokens: int, size: int) -> None:
    def pages_of(first: int) -> int:
        seen = [p for q in range(first, first + num_tokens) for p in range(max(0, q - window + 1), q + 1)]
        return len({p // size for p in seen})

    assert most_pages(window, num_tokens, size) == max(pages_of(window + place) for place in range(size))


@given(position=st.integers(0, 200), window=st.none() | st.integers(1, 40), size=st.integers(1, 9))
def test_the_first_page_seen(position: int, window: int | None, size: int) -> None:
    low = 0 if window is None else max(0, position - window + 1)
    assert first_page_seen(position, window, size) == low // size


def test_blocks_to_hold() -> None:
    assert count_pages(0, 4) == 0
    assert blocks_to_hold(count_pages(100, 4), (None,), 4) == 25
    assert blocks_to_hold(25, (None, 6, None, 6), 4) == 25 + 3 + 25 + 3
    assert blocks_to_hold(2, (None, 6), 4) == 4, "a short request never fills its window"
    assert blocks_to_hold(25, (6,), 4, num_tokens=8) == 4
