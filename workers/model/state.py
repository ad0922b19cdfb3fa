"""The state that attention keeps, as the engine counts it. Pure; no torch."""

from collections.abc import Sequence

from kv_transfer.layout import ELEMENT_BYTES, Dtype
from workers.engine.state import StateSpec


def kv_state(num_kv_heads: int, head_dim: int, windows: Sequence[int | None], dtype: Dtype) -> tuple[StateSpec, ...]:
    """K and V of every token in `dtype`, one spec per layer; `windows` as the layers attend."""
    return tuple(
        StateSpec(
            stream="kv",
            kind="append" if window is None else "window",
            entry_bytes=2 * num_kv_heads * head_dim * ELEMENT_BYTES[dtype],
            window=window,
            tp_shards=num_kv_heads,
        )
        for window in windows
    )
