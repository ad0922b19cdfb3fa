"""Which computed blocks a new request may use instead of computing them: names of full blocks
(`workers/prefix_hash.py`, a chain of hashes) to block numbers. Knows names and numbers; the pool counts references and
evicts.

Only full blocks whose KV is final are entered, so an entry is never written again: the last, partial block of a request
is always its own. A table has one list of blocks per state group. A group that appends needs every block of a prefix; a
group with a window only those that the next token still sees: the rest of its table is NULL_BLOCK.

Two requests that compute the same text side by side hold a block of the same name each; the first one is entered, the
other is free again after use. Owned by the engine thread.
"""

from collections.abc import Sequence

from kv_transfer.layout import NULL_BLOCK
from workers.engine.block_pool import BlockPool
from workers.pages import Windows, first_page_seen


class PrefixCache:
    """The index of one pool, whose evictions it follows."""

    def __init__(self, pool: BlockPool, block_tokens: int, windows: Windows) -> None:
        self._pool, self._block_tokens, self._windows = pool, block_tokens, tuple(windows)
        pool.on_evict = self._forget
        self._blocks: list[dict[bytes, int]] = [{} for _ in self._windows]
        self._names: dict[int, tuple[int, bytes]] = {}
        self._published = next((g for g, window in enumerate(self._windows) if window is None), 0)
        self._changes: dict[bytes, bool] = {}

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._names)

    def match(self, chain: Sequence[bytes], most: int) -> int:
        """The longest usable prefix in blocks, at most `most` of the named ones."""
        found = min(most, len(chain))
        for group, window in enumerate(self._windows):
            if window is None:
                blocks = self._blocks[group]
                found = next((page for page in range(found) if chain[page] not in blocks), found)
        return self._shorten_for_windows(chain, found)

    def _shorten_for_windows(self, chain: Sequence[bytes], found: int) -> int:
        """The longest prefix up to `found` blocks whose last blocks are here for every group with a window."""
        group = 0
        while group < len(self._windows) and found:
            missing = self._last_missing(chain, found, group)
            # A prefix that ends after a missing page and near it misses it too: the next candidate ends before it.
            found, group = (found, group + 1) if missing is None else (missing, 0)
        return found

    def _last_missing(self, chain: Sequence[bytes], found: int, group: int) -> int | None:
        window = self._windows[group]
        if window is None:
            return None
        first = first_page_seen(found * self._block_tokens, window, self._block_tokens)
        blocks = self._blocks[group]
        return next((page for page in range(found - 1, first - 1, -1) if chain[page] not in blocks), None)

    def tables(self, chain: Sequence[bytes], num_pages: int) -> list[list[int]]:
        """The block tables of a prefix that `match` found."""
        tables = []
        for blocks, window in zip(self._blocks, self._windows, strict=True):
            first = first_page_seen(num_pages * self._block_tokens, window, self._block_tokens)
            tables.append([NULL_BLOCK] * first + [blocks[name] for name in chain[first:num_pages]])
        return tables

    def enter(self, chain: Sequence[bytes], tables: Sequence[Sequence[int]], first: int, end: int) -> None:
        """The KV of pages `first` to `end` is final: whoever asks for these names finds their blocks from now on.

        Pages that slid out of a window are passed over, and so are names that are known already.
        """
        for group, table in enumerate(tables):
            blocks = self._blocks[group]
            for page in range(first, end):
                name, block = chain[page], table[page]
                if block == NULL_BLOCK or name in blocks:
                    continue
                blocks[name] = block
                self._names[block] = (group, name)
                self._pool.keep(block)
                if group == self._published:
                    self._note(name, True)

    def _forget(self, block: int) -> None:
        group, name = self._names.pop(block)
        del self._blocks[group][name]
        if group == self._published:
            self._note(name, False)

    # --- what ingresses hear of it ------------------------------------------------------------------------------------

    def _note(self, name: bytes, is_here: bool) -> None:
        if self._changes.pop(name, None) is None:
            self._changes[name] = is_here

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Names entered and names gone since the last call; what came and went meanwhile is in neither."""
        changes, self._changes = self._changes, {}
        return [n for n, is_here in changes.items() if is_here], [n for n, is_here in changes.items() if not is_here]

    def published(self) -> list[bytes]:
        """Every name that an ingress may know."""
        return list(self._blocks[self._published])

    def check_integrity(self) -> None:
        """Assert that names and blocks point at each other and that the pool keeps exactly these blocks."""
        pairs = {(group, name): block for group, blocks in enumerate(self._blocks) for name, block in blocks.items()}
        assert {block: pair for pair, block in pairs.items()} == self._names, "names and blocks disagree"
        assert len(pairs) == len(self._names), "two names for one block"
        assert all(self._pool.is_kept(block) for block in self._names), "a named block is not kept"
