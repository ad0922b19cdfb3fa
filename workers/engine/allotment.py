"""Which blocks a request has: the cached beginning of its text shared, the rest its own. Pure.

    page   0     1     2     3     4
         [ shared    |  its own ...      ]   one row per state group; NULL_BLOCK where a window slid past
                     ^ computed            ^ last page: partly filled, never shared

Shared pages are full and final: nothing writes below `computed`; own pages are entered into the prefix cache as soon as
they are. Owned by the engine thread.
"""

from collections.abc import Collection

from workers.engine.block_pool import BlockPool
from workers.engine.config import EngineConfig
from workers.engine.prefix_cache import NULL_BLOCK, PrefixCache
from workers.engine.request import Request
from workers.prefix_hash import extend_chain, root_of


class Allotment:
    """The blocks of all requests of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.pool = BlockPool(config.num_blocks)
        self.prefixes = PrefixCache(self.pool, config.block_tokens, config.windows)
        self._num_groups = len(config.windows)

    def find_prefix(self, request: Request) -> int:
        """Known tokens that are cached now: whole blocks, never the last token, which must run to be sampled from."""
        if not self._config.prefix_cache:
            return 0
        most = (len(request.known) - 1) // self._config.block_tokens
        self._name(request, most)
        return self.prefixes.match(request.names, most) * self._config.block_tokens

    def has_room(self, request: Request, num_pages: int, keep_free: int) -> bool:
        """Whether `give` finds its blocks and leaves `keep_free` pages of every group available."""
        num_shared, tables = self._shared_tables(request)
        held = sum(self.pool.count_unreferenced(table) for table in tables)
        return self.pool.num_available - held >= self._num_groups * (num_pages - num_shared + keep_free)

    def give(self, request: Request, num_pages: int) -> None:
        """Blocks for `num_pages` pages, the cached prefix among them: `request.computed` is the prefix. The caller has
        asked `has_room`."""
        num_shared, tables = self._shared_tables(request)
        for table in tables:
            self.pool.share([block for block in table if block != NULL_BLOCK])
        for table in tables:
            table += self.pool.allocate(num_pages - num_shared)
        request.tables, request.num_entered = tables, num_shared
        request.computed = num_shared * self._config.block_tokens

    def _shared_tables(self, request: Request) -> tuple[int, list[list[int]]]:
        num_shared = self.find_prefix(request) // self._config.block_tokens
        return num_shared, self.prefixes.tables(request.names, num_shared)

    @property
    def can_grow(self) -> bool:
        return self.pool.num_available >= self._num_groups

    def grow(self, request: Request) -> None:
        """One more page. The caller has checked `can_grow`."""
        for table in request.tables:
            table += self.pool.allocate(1)

    def take_back(self, request: Request, quarantine: Collection[int] = ()) -> None:
        """Every block is given up: cached where it was entered, else free, but for those in quarantine."""
        for table in request.tables:
            held = [block for block in table if block != NULL_BLOCK]
            self.pool.release(held, [block for block in quarantine if block in held])
        request.tables = []

    def note_computed(self, request: Request) -> None:
        """Enters what has become full and final; call when `request.computed` has grown."""
        full = request.computed // self._config.block_tokens
        if full > request.num_entered and self._config.prefix_cache:
            self._name(request, full)
            self.prefixes.enter(request.names, request.tables, request.num_entered, full)
            request.num_entered = full

    def _name(self, request: Request, num_pages: int) -> None:
        root = b"" if request.names else root_of(request.tenant)
        extend_chain(request.names, root, request.known, self._config.block_tokens, num_pages)

    def assert_private(self, request: Request, num_tokens: int) -> None:
        """That the next tokens are written into blocks that nobody else reads or will find."""
        first = request.computed // self._config.block_tokens
        end = -(-(request.computed + num_tokens) // self._config.block_tokens)
        for table in request.tables:
            for block in table[first:end]:
                assert self.pool.is_private(block), f"{request.key!r} would write into block {block}, which is shared"

    def check_integrity(self, requests: Collection[Request]) -> None:
        """Assert that used blocks are those of the requests, and shared ones where they are full and final."""
        self.pool.check_integrity()
        self.prefixes.check_integrity()
        held = [block for request in requests for table in request.tables for block in table if block != NULL_BLOCK]
        assert len(set(held)) == self.pool.num_used, "used blocks are not those of the requests"
        for request in requests:
            size = self._config.block_tokens
            assert all(request.computed <= len(table) * size for table in request.tables), (
                f"{request.key!r} computed past its blocks"
            )
            for table in request.tables:
                for page, block in enumerate(table):
                    is_written = (page + 1) * size > request.computed
                    assert not (is_written and block != NULL_BLOCK) or self.pool.is_private(block), (
                        f"{request.key!r} may still write into shared block {block}"
                    )
