"""Which blocks a request has: the cached beginning of its text shared, the rest its own. Pure.

    page              0     1     2     3     4     5
    no window       [ shared    |  its own ...            ]   a row per state group, all of its pages at once
    with a window   [ null  null|  its own ...      ]         only what a token may still see, page after page
                                ^ computed     ^ what the next step writes is never shared

Shared pages are full and final: nothing writes below `computed`; own pages are entered into the prefix cache as soon as
they are. What slid out of a window is released at once. What a window will hold at most is promised beforehand, so that
a request never stops for want of the next page of a window:

    blocks in groups with a window, used or still available  >=  what all requests are promised

A block that several requests see counts as promised to each of them: any of them may need another one next.
Owned by the engine thread.
"""

from collections.abc import Collection

from kv_transfer.layout import NULL_BLOCK
from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.prefix_cache import PrefixCache
from workers.engine.request import Request
from workers.pages import first_page_seen, most_pages
from workers.prefix_hash import extend_chain, root_of


class Allotment:
    """The blocks of all requests of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.pool = BlockPool(config.num_blocks)
        self.prefixes = PrefixCache(self.pool, config.block_tokens, config.windows)
        self._whole = [group for group, window in enumerate(config.windows) if window is None]
        self._sliding = [(group, window) for group, window in enumerate(config.windows) if window is not None]
        self._num_promised = 0
        self._num_sliding = 0  # used blocks of groups with a window

    @property
    def num_available(self) -> int:
        """Blocks that are promised to nobody: free and cached ones, less what windows may still ask for."""
        return self.pool.num_available - self._num_promised + self._num_sliding

    @property
    def blocks_per_page(self) -> int:
        """Blocks that a long request takes when it grows by a page."""
        return max(1, len(self._whole))

    # --- all blocks of a request --------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> int:
        """Known tokens that are cached now: whole blocks, never the last token, which must run to be sampled from."""
        if not self._config.prefix_cache:
            return 0
        most = (len(request.known) - 1) // self._config.block_tokens
        self._name(request, most)
        return self.prefixes.match(request.names, most) * self._config.block_tokens

    def has_room(self, request: Request, num_pages: int, keep_free: int) -> bool:
        """Whether `give` finds its blocks and leaves `keep_free` available."""
        num_shared, tables = self._shared_tables(request)
        held = sum(self.pool.count_unreferenced(tables[group]) for group in self._whole)
        needed = held + len(self._whole) * (num_pages - num_shared)
        if self._sliding:
            needed += self._promise(request, num_pages, self._seen_from(request, num_shared))
        return self.num_available - needed >= keep_free

    def give(self, request: Request, num_pages: int) -> None:
        """Blocks for `num_pages` pages, the cached prefix among them: `request.computed` is the prefix. The caller has
        asked `has_room`."""
        num_shared, tables = self._shared_tables(request)
        request.num_pages, request.num_entered = num_pages, num_shared
        request.computed = num_shared * self._config.block_tokens
        request.num_slid = [0] * len(tables)
        for group in self._whole:
            self.pool.share(tables[group])
        if self._sliding:
            self._give_sliding(request, tables)
        for group in self._whole:
            tables[group] += self.pool.allocate(num_pages - num_shared)
        request.tables = tables

    def _give_sliding(self, request: Request, tables: list[list[int]]) -> None:
        """Shares what the next computed token sees; for a request that adopts gives what its first decode step sees."""
        seen_from = self._seen_from(request, request.num_entered)
        self._promise_anew(request, seen_from)
        before = self.pool.num_used
        for group, window in self._sliding:
            first = first_page_seen(seen_from, window, self._config.block_tokens)
            tables[group] = [NULL_BLOCK] * first + tables[group][first:]
            request.num_slid[group] = first
            self.pool.share(tables[group][first:])
        self._num_sliding += self.pool.num_used - before
        if request.adopts:
            request.tables = tables
            self._extend(request, self._config.pages_for(len(request.known)))

    def _seen_from(self, request: Request, num_shared: int) -> int:
        """The token that is computed first, through the windows of which blocks are needed."""
        return len(request.known) if request.adopts else num_shared * self._config.block_tokens

    def _shared_tables(self, request: Request) -> tuple[int, list[list[int]]]:
        num_shared = self.find_prefix(request) // self._config.block_tokens
        return num_shared, self.prefixes.tables(request.names, num_shared)

    def take_back(self, request: Request, quarantine: Collection[int] = ()) -> None:
        """Every block is given up: cached where it was entered, else free, but for those in quarantine."""
        if not request.tables:
            return
        before = self.pool.num_used
        for group, _ in self._sliding:
            self._release(request.tables[group], quarantine)
        self._num_sliding -= before - self.pool.num_used
        for group in self._whole:
            self._release(request.tables[group], quarantine)
        self._num_promised -= request.num_promised
        request.tables, request.num_slid, request.num_pages, request.num_promised = [], [], 0, 0

    def _release(self, table: Collection[int], quarantine: Collection[int]) -> None:
        held = [block for block in table if block != NULL_BLOCK]
        self.pool.release(held, [block for block in quarantine if block in held])

    # --- page after page ----------------------------------------------------------------------------------------------

    def can_grow(self, request: Request) -> bool:
        needed = len(self._whole)
        if self._sliding:
            needed += self._promise(request, request.num_pages + 1, request.computed) - request.num_promised
        return self.num_available >= needed

    def grow(self, request: Request) -> None:
        """One more page. The caller has asked `can_grow`."""
        request.num_pages += 1
        if self._sliding:
            self._promise_anew(request, request.computed)
        for group in self._whole:
            request.tables[group] += self.pool.allocate(1)

    def cover(self, request: Request, end: int) -> None:
        """Gives the pages that the tokens from `request.computed` to `end` are written to; they are the request's
        alone. The caller stays within its pages."""
        num_pages = self._config.pages_for(end)
        assert num_pages <= request.num_pages, f"{request.key!r} has no block for token {end - 1}"
        if self._sliding:
            self._extend(request, num_pages)
        first = request.computed // self._config.block_tokens
        for table in request.tables:
            for block in table[first:num_pages]:
                assert self.pool.is_private(block), f"{request.key!r} would write into block {block}, which is shared"

    def note_computed(self, request: Request) -> None:
        """Enters what has become full and final, and lets go of what no later token sees; call when `request.computed`
        has grown."""
        full = request.computed // self._config.block_tokens
        if full > request.num_entered and self._config.prefix_cache:
            self._name(request, full)
            self.prefixes.enter(request.names, request.tables, request.num_entered, full)
            request.num_entered = full
        if self._sliding:
            self._slide(request)

    def _slide(self, request: Request) -> None:
        before, has_slid = self.pool.num_used, False
        for group, window in self._sliding:
            first = request.num_slid[group]
            end = first_page_seen(request.computed, window, self._config.block_tokens)
            if end > first:
                table, has_slid = request.tables[group], True
                self.pool.release(table[first:end])
                table[first:end] = [NULL_BLOCK] * (end - first)
                request.num_slid[group] = end
        if has_slid or request.computed == request.catch_up_to:
            self._num_sliding -= before - self.pool.num_used
            self._promise_anew(request, request.computed)

    def _extend(self, request: Request, num_pages: int) -> None:
        """Tables of groups with a window reach `num_pages`."""
        for group, _ in self._sliding:
            table = request.tables[group]
            missing = num_pages - len(table)
            if missing > 0:
                table += self.pool.allocate(missing)
                self._num_sliding += missing

    def _promise(self, request: Request, num_pages: int, seen_from: int) -> int:
        """Blocks of groups with a window that the request holds at most at a time, once the next token is the one at
        `seen_from`."""
        size = self._config.block_tokens
        at_once = self._config.chunk_tokens if self._is_computed_in_chunks(request, seen_from) else 1
        return sum(
            min(num_pages - first_page_seen(seen_from, window, size), most_pages(window, at_once, size))
            for _, window in self._sliding
        )

    @staticmethod
    def _is_computed_in_chunks(request: Request, seen_from: int) -> bool:
        return not request.adopts and seen_from < max(request.catch_up_to, len(request.known) - 1)

    def _promise_anew(self, request: Request, seen_from: int) -> None:
        promised = self._promise(request, request.num_pages, seen_from)
        self._num_promised += promised - request.num_promised
        request.num_promised = promised

    def _name(self, request: Request, num_pages: int) -> None:
        root = b"" if request.names else root_of(request.tenant)
        extend_chain(request.names, root, request.known, self._config.block_tokens, num_pages)

    # --- the books ----------------------------------------------------------------------------------------------------

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that used blocks are those of the requests, shared ones only where they are full and final, that
        windows have let go of what they slid past and of nothing else, and that promises can be kept."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()
        held = [block for request in requests for table in request.tables for block in table if block != NULL_BLOCK]
        assert len(set(held)) == self.pool.num_used, "used blocks are not those of the requests"
        given = [request.tables for request in requests if request.tables]
        sliding = {block for tables in given for group, _ in self._sliding for block in tables[group]}
        assert len(sliding - {NULL_BLOCK}) == self._num_sliding, "blocks of groups with a window are counted wrongly"
        assert self._num_promised == sum(request.num_promised for request in requests), "promises are counted wrongly"
        assert self.num_available >= 0, f"{-self.num_available} blocks are promised that are not there"
        for request in requests:
            if request.tables:
                self._check_tables(request)

    def _check_tables(self, request: Request) -> None:
        size = self._config.block_tokens
        seen_from = len(request.known) if request.adopts and request.status == "reserved" else request.computed
        held = 0
        for table, window in zip(request.tables, self._config.windows, strict=True):
            first, end = first_page_seen(seen_from, window, size), len(table)
            assert request.computed <= request.num_pages * size, f"{request.key!r} computed past its pages"
            assert end == request.num_pages if window is None else end >= self._config.pages_for(request.computed)
            assert table[:first] == [NULL_BLOCK] * min(first, end), f"{request.key!r} holds what it slid past"
            assert NULL_BLOCK not in table[first:], f"{request.key!r} lacks a page that its next token sees"
            held += 0 if window is None else max(0, end - first)
            for page in range(first, end):
                is_written = (page + 1) * size > request.computed
                assert not is_written or self.pool.is_private(table[page]), (
                    f"{request.key!r} may still write into shared block {table[page]}"
                )
        assert held <= request.num_promised, f"{request.key!r} holds {held} blocks, promised {request.num_promised}"
