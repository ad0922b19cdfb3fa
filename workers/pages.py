"""Pages of a block table: how many a request needs, and which of them a window still sees. Pure arithmetic, for the
engine, which gives them, and for the ingress, which foresees it.

A page is `block_tokens` consecutive positions of one request; a table says which block holds it. The token at position
p sees the `window` latest positions, itself included, or all of them where the window is None.
"""

from collections.abc import Sequence

Windows = Sequence[int | None]
"""One per state group."""


def count_pages(num_tokens: int, block_tokens: int) -> int:
    """Pages that hold the first `num_tokens` positions."""
    return -(-num_tokens // block_tokens)


def first_page_seen(position: int, window: int | None, block_tokens: int) -> int:
    """The first page that the token at `position` still reads."""
    return 0 if window is None else max(0, position - window + 1) // block_tokens


def most_pages(window: int, num_tokens: int, block_tokens: int) -> int:
    """Pages that `num_tokens` consecutive tokens of one step see and write at most, wherever they stand: together they
    see window - 1 + num_tokens positions, which start anywhere in a page."""
    return (window + num_tokens - 3) // block_tokens + 2 if window + num_tokens > 2 else 1


def blocks_to_hold(num_pages: int, windows: Windows, block_tokens: int, num_tokens: int = 1) -> int:
    """Blocks of all groups that a request of `num_pages` pages holds at most, computed `num_tokens` tokens a step."""
    return sum(
        num_pages if window is None else min(num_pages, most_pages(window, num_tokens, block_tokens))
        for window in windows
    )
