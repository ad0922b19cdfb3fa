"""The op set: everything that a decoder computes, over a flat batch of T tokens without padding.

A backend is one object per process and device, used by one thread at a time. `reference` (plain torch) says what each
op means; the contract suite holds every backend against it in float64.

    embed -> per layer [ norm -> linear -> rotate_and_store -> attend -> linear -> norm -> mlp ] -> norm -> head

Shapes: T tokens of the step, M width of the model, N outputs, K inputs, I width of the MLP, H query heads, J KV heads,
D head_dim, B blocks, S block_tokens, X entries of all block tables, R asked rows, V vocabulary. The cache of one layer
is `[B, 2 (K, V), J, S, D]`, float32 or bfloat16. Activations are contiguous float32 on the backend's device (the
reference may compute in float64); positions, rows and blocks are int64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from workers.ops.weights import Activation, AttentionLayer, DecoderWeights, DenseMLP, Packed, RoutedMLP, Weight


class Span(NamedTuple):
    """One request's part of the flat batch."""

    first_row: int
    """Its first token's row in the batch; rows of a span are consecutive, spans follow each other and cover T."""
    num_tokens: int
    first_position: int
    """Tokens of the request before this step, all in the cache."""
    first_entry: int
    """Where its block table starts in `StepTables.table_X`."""
    num_blocks: int
    """Entries of its block table: as many as hold its context."""

    @property
    def context(self) -> int:
        return self.first_position + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepTables:
    """Where the tokens of one step are and what they may see; made once per step and state group, the same for its
    layers."""

    positions_T: Tensor
    block_of_T: Tensor
    slot_of_T: Tensor
    """Where each token's K and V go."""
    table_X: Tensor
    """Block tables one after the other: token p of a span lies in block table_X[first_entry + p // S], slot p % S. -1
    where a window slid past: before everything that a token of the step sees."""
    spans: tuple[Span, ...]


class RowDraw(NamedTuple):
    """How one row of logits becomes a token; see `workers/sampling/sampler.py` for what the settings mean."""

    row: int
    temperature: float
    """> 0."""
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    """The number in [0, 1) that decides."""


DrawRows = Callable[[Tensor, Sequence[RowDraw]], list[int]]
"""(logits [R, V], draws) to a token per draw: what `sampling/sampler.py` computes, to float32. Rows drawn from have a
finite maximum. Not every backend has one."""

FindLargest = Callable[[Tensor], tuple[list[float], list[int]]]
"""Each row's largest logit, NaN where one of the row is, and the first place it stands at."""


@dataclass(frozen=True, slots=True)
class PlainTables:
    """`StepTables` as plain numbers, for a backend that needs no tensor of them. The first tensor that is made after a
    step, whose weights have swept the caches, costs 60 us: a fiftieth of a step of one token (measured).
    """

    positions: Sequence[int]
    block_of: Sequence[int]
    slot_of: Sequence[int]
    table: Sequence[int]
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class DecodeTables(StepTables):
    """A step of one token per request, N = T rows, in tensors that keep their place from step to step.

    A recorded forward pass reads the next step's numbers there, so nothing is decided by a number on the host: `spans`
    is empty. Rows beyond the step's requests are padding with a context of 1 in a block that belongs to nobody.
    """

    table_NW: Tensor
    """int32: block tables, W entries each; those beyond a context are any valid block."""
    context_N: Tensor
    """int32."""


class Step(Protocol):
    """A whole forward pass in one call, for models that a backend knows in one piece."""

    def run(
        self, ids_T: Tensor, rows_R: Tensor, tables: StepTables, data: Tensor, on_layer: Callable[[int], None]
    ) -> Tensor:
        """Logits `[R, V]` float32 of the asked rows; R may be 0.

        All layers are of one group: `data` is the whole cache `[num_layers, B, 2, J, S, D]`. `on_layer(layer)` is
        called on the calling thread once the layer's K and V of all T tokens are in it, in order. An exception of it
        ends the step and is raised here.
        """
        ...


class Ops(Protocol):
    """One backend. Inputs are never changed except where said; results are fresh."""

    name: str
    device: torch.device
    key_is_dim_major: bool
    """K lies in a block as [D][S] instead of [S][D] (V never does); the shape of the cache tensor does not tell."""

    def pack(self, weight: Weight) -> Packed:
        """The weight in this backend's form; the given one is not needed afterwards. Equal grid values, whatever the
        form.
        """
        ...

    def embed(self, ids_T: Tensor, table: Packed, scale: float) -> Tensor:
        """`[T, M]`: rows of the table times `scale`."""
        ...

    def norm(self, x_TM: Tensor, weight_M: Tensor, eps: float, delta_TM: Tensor | None = None) -> Tensor:
        """RMSNorm of x, or of x + delta; then x becomes x + delta in place (x is the residual stream)."""
        ...

    def linear(self, x_TK: Tensor, weight: Packed, bias_N: Tensor | None = None) -> Tensor:
        """`[T, N]`: x times the transposed weight, plus bias.

        With an Int8, Q8 or Q4 weight x is rounded first: per row and group of 32, with m = max |x| and everything in
        float32, scale = m / 127 and q = round_half_even(x * (127 / m)), zeros where m < 1e-30. Backends agree on q
        exactly for equal x; the order of float sums is theirs. With a bfloat16 weight a backend of tensor cores (cuda)
        rounds x to bfloat16 first; sums are float32.
        """
        ...

    def rotate_and_store(
        self, qkv_TN: Tensor, attention: AttentionLayer, tables: StepTables, cache_B2JSD: Tensor
    ) -> Tensor:
        """`[T, H, D]`: q after head norm and rope. K (after the same) and V of all tokens are in the cache, rounded to
        its dtype; q is not scaled.
        """
        ...

    def attend(self, q_THD: Tensor, attention: AttentionLayer, tables: StepTables, cache_B2JSD: Tensor) -> Tensor:
        """`[T, H D]`: each token attends to its own request's cached tokens up to itself, within the window.

        Slots that no token has written hold anything, NaN included, and change nothing.
        """
        ...

    def activate(self, gate_up_TN: Tensor, activation: Activation) -> Tensor:
        """`[T, I]` of `[T, 2 I]`.

        silu: silu(g) * u. gelu_tanh: gelu_tanh(g) * u. swiglu_clamp (gpt-oss): g = min(g, 7), u = clamp(u, -7, 7),
        (u + 1) * g * sigmoid(1.702 g).
        """
        ...

    def dense_mlp(self, x_TM: Tensor, mlp: DenseMLP) -> Tensor:
        """`[T, M]`: down(activate(gate_up(x)))."""
        ...

    def experts(self, x_TM: Tensor, mlp: RoutedMLP) -> Tensor:
        """`[T, M]`: the sum over each token's top_k experts of share * expert(x).

        Shares are softmax over all experts' logits, renormalized or not; among equal logits any may be chosen.
        """
        ...

    def head(self, x_RM: Tensor, weight: Packed, softcap: float | None) -> Tensor:
        """Logits `[R, V]` float32 of normed rows, capped as softcap * tanh(logit / softcap). R may be 0."""
        ...

    def make_step(self, model: DecoderWeights) -> Step | None:
        """The whole model in one call, or None: then `model/decoder.py` calls op by op. Equal results either way."""
        ...
