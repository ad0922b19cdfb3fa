"""What a model keeps of each token it has computed, layer by layer, and which layers share a block table. Pure.

    spec     one per layer: full attention appends, a sliding window lets go of what slid out, a recurrent layer keeps
             a fixed state, latents and compressed entries are appends of other sizes
    group    layers of equal spec with one block table per request; every group has as many layers as any other
    page     `block_tokens` tokens of the layers of one group: all pages are equally large, so one pool serves all

SmolLM2 is one group of 30 layers. 15 layers with a window and 3 without are six groups of 3: a long context takes one
page more per `block_tokens`, and five groups hold what a window sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workers.errors import ModelRefused

MAX_PADDING = 1 / 8
"""Places in pages, as a share of the layers of a spec, that may stay unused so that there are fewer tables to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The state of one layer of one kind ("stream")."""

    stream: str
    """"kv", or another name for what is kept."""
    kind: Literal["append", "window", "fixed"]
    tokens_per_entry: int = 1
    """Tokens that one entry stands for, >= 1."""
    entry_bytes: int
    """Of one entry in one layer, > 0; of the whole state where it is fixed."""
    window: int | None = None
    """Latest tokens that a token sees, itself included, >= 1; with kind "window" only."""
    tp_shards: int
    """Equal parts that ranks may share an entry out in: the KV heads, or 1."""
    prefix_cacheable: bool = True
    """Whether another request with the same beginning may use it."""
    rewindable: bool = True
    """Whether the latest tokens can be taken back."""

    def __post_init__(self) -> None:
        assert (self.kind == "window") == (self.window is not None), f"{self.kind} with window {self.window}"
        assert min(self.entry_bytes, self.tokens_per_entry) > 0, "an entry has a size and stands for tokens"
        assert self.window is None or self.window > 0, "a token sees itself"


@dataclass(frozen=True, slots=True)
class StateGroup:
    spec: StateSpec
    layers: tuple[int, ...]
    """In order; the place of a layer in its page is its index here."""


def plan_groups(specs: Sequence[StateSpec]) -> tuple[StateGroup, ...]:
    """Groups of equal specs that cover `specs`, one per layer, in the order of their first layers.

    A group has as many layers as any other, but for the last one of a spec. Raises `ModelRefused` for state that is not
    served.
    """
    assert specs, "a model has layers"
    _check_served(specs)
    layers_of: dict[StateSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    counts = [len(layers) for layers in layers_of.values()]
    sizes = [n for n in range(1, max(counts) + 1) if all(-count % n <= MAX_PADDING * count for count in counts)]
    size = min(sizes, key=lambda n: (sum(-(-count // n) for count in counts), n))
    groups = [
        StateGroup(spec, tuple(layers[first : first + size]))
        for spec, layers in layers_of.items()
        for first in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers))


def _check_served(specs: Sequence[StateSpec]) -> None:
    """The first spec is as good as any to measure the others by: pages are equally large where entries are."""
    for layer, spec in enumerate(specs):
        if spec.kind == "fixed":
            raise ModelRefused(f"layer {layer} keeps a fixed state ({spec.stream}), which Baton does not serve yet")
        if spec.tokens_per_entry != 1:
            raise ModelRefused(
                f"layer {layer} keeps one entry ({spec.stream}) per {spec.tokens_per_entry} tokens, which Baton does "
                "not serve yet"
            )
        if (spec.stream, spec.entry_bytes) != (specs[0].stream, specs[0].entry_bytes):
            raise ModelRefused(
                f"layer {layer} keeps {spec.entry_bytes} bytes a token ({spec.stream}), layer 0 "
                f"{specs[0].entry_bytes} ({specs[0].stream}): Baton serves equal ones only"
            )
