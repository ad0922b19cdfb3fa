"""What an engine is built with. Knows numbers only."""

from dataclasses import dataclass

from workers.pages import blocks_to_hold, count_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine; raises ValueError where they contradict each other."""

    block_tokens: int
    """Tokens per KV block, >= 1."""
    num_blocks: int
    """KV blocks in the pool, >= 1."""
    chunk_tokens: int
    """Prompt tokens computed per step, all requests together, >= 1."""
    max_running: int
    """Requests reserved, running or preempted at the same time, >= 1; held ones do not count."""
    max_context_tokens: int
    """Prompt and output tokens of one request, >= 2; the pool holds at least one such request."""
    windows: tuple[int | None, ...] = (None,)
    """Per state group the number of latest tokens that a token sees; None: all of them. At least one group."""
    prefix_cache: bool = True
    """Whether requests share the blocks of equal beginnings."""
    step_budget_ms: float | None = None
    """What a step may take once prompts join it, > 0; None: only `chunk_tokens` bounds it."""
    min_chunk_tokens: int = 16
    """Prompt tokens that a step computes however little of the budget is left, >= 1."""
    ageing_tokens_per_s: float = 1000.0
    """A waiting prompt ranks as if it were this much shorter for each second since it arrived, > 0."""

    def __post_init__(self) -> None:
        for name, low in (
            ("block_tokens", 1),
            ("num_blocks", 1),
            ("chunk_tokens", 1),
            ("max_running", 1),
            ("min_chunk_tokens", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}, needs at least {low}")
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows {self.windows} need a group at least, and each window a token")
        if self.step_budget_ms is not None and self.step_budget_ms <= 0:
            raise ValueError(f"step_budget_ms is {self.step_budget_ms}, needs to be over 0, or none")
        if self.max_context_tokens < 2:
            raise ValueError(
                f"max_context_tokens is {self.max_context_tokens}, needs room for a prompt and an output: 2"
            )
        if self.ageing_tokens_per_s <= 0:
            raise ValueError(f"ageing_tokens_per_s is {self.ageing_tokens_per_s}: a long prompt would wait for ever")
        needed = self.blocks_to_hold(self.pages_for(self.max_context_tokens))
        if needed > self.num_blocks:
            raise ValueError(
                f"max_context_tokens {self.max_context_tokens} does not fit the pool of {self.num_blocks} blocks of "
                f"{self.block_tokens} tokens: it needs {needed}; raise num_blocks or lower max_context_tokens"
            )

    def pages_for(self, num_tokens: int) -> int:
        """Entries of a block table that hold `num_tokens` tokens."""
        return count_pages(num_tokens, self.block_tokens)

    def blocks_to_hold(self, num_pages: int) -> int:
        """Blocks of all groups that a request of so many pages holds at most while it is computed."""
        return blocks_to_hold(num_pages, self.windows, self.block_tokens, self.chunk_tokens)
