"""The state that attention keeps, as the engine counts it. Pure; no torch."""

from collections.abc import Sequence

from kv_transfer.layout import ELEMENT_BYTES, Dtype
from workers.engine.state import StateSpec
from workers.model.arch import DecoderSpec


def kv_state(spec: DecoderSpec, windows: Sequence[int | None], dtype: Dtype) -> tuple[StateSpec, ...]:
    """K and V of every token in `dtype`, one spec per layer; `windows` as the layers attend."""
    entry_bytes = spec.kv_bytes_per_token_and_layer(ELEMENT_BYTES[dtype])
    return tuple(
        StateSpec(
            stream="kv",
            kind="append" if window is None else "window",
            entry_bytes=entry_bytes,
            window=window,
            tp_shards=spec.num_kv_heads,
        )
        for window in windows
    )
