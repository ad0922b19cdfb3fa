"""What a decoder is made of: weights as they lie in memory before a backend packs them, and the layers that hold them.

Knows tensors. Knows no file, no name of a checkpoint and no kernel.

Shapes: N outputs, K inputs, G = K / 32 groups of a row, P = K / 2 bytes of a row, M width of the model, I width of the
MLP, H query heads, J KV heads, D head_dim, R = rope channels / 2, E experts.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from workers.quantization.int8 import GROUP as GROUP

Activation = Literal["silu", "gelu_tanh", "swiglu_clamp"]


class Packed(Protocol):
    """A matrix in the form that one backend computes with; only that backend looks inside."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes held, scales included."""
        ...


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """float32 or bfloat16 (float64 in tests). bfloat16 saves memory only: products and sums are float32."""

    data_NK: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data_NK.shape[0], self.data_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.data_NK.nbytes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """w = scale_N * q; q is -128 to 127, one float32 scale per row."""

    q_NK: Tensor
    scale_N: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_NK.shape[0], self.q_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.q_NK.nbytes + self.scale_N.nbytes


@dataclass(frozen=True, slots=True)
class Q8Weight:
    """GGUF's Q8_0 grid: w = scale_NG * q; q is -128 to 127, one float16 scale per group of 32."""

    q_NK: Tensor
    scale_NG: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_NK.shape[0], self.q_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.q_NK.nbytes + self.scale_NG.nbytes


@dataclass(frozen=True, slots=True)
class Q4Weight:
    """GGUF's Q4_1 grid: w = scale_NG * q + min_NG; q is 0 to 15, scale and min are float16 per group of 32.

    The 16 bytes of a group lie as in the file: byte b of group g holds input 32 g + b in its low half and input
    32 g + 16 + b in its high half.
    """

    q_NP: Tensor
    """uint8."""
    scale_NG: Tensor
    min_NG: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.q_NP.shape[0], 2 * self.q_NP.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.q_NP.nbytes + self.scale_NG.nbytes + self.min_NG.nbytes


Weight = DenseWeight | Int8Weight | Q8Weight | Q4Weight


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotation by position: channels i and i + R of the first 2 R channels of a head turn together; the rest stay."""

    cos_LR: Tensor
    sin_LR: Tensor
    """float32, contiguous, one row per position from 0; a row of position p turns pair i by the angle of (p, i)."""

    @property
    def max_positions(self) -> int:
        return self.cos_LR.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """All that attention of one layer needs beside activations and cache. Vectors are float32."""

    num_heads: int
    num_kv_heads: int
    """Divides num_heads: query head h reads KV head h // (num_heads // num_kv_heads)."""
    head_dim: int
    scale: float
    """Factor of the scores; applied to q * k, not to q in the cache's place."""
    rope: RopeTable | None
    window: int | None = None
    """A token sees itself and the window - 1 tokens before it; None sees all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap), after `scale`."""
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    """RMSNorm of each head before rope; both or neither."""
    norm_eps: float = 1e-6
    sinks_H: Tensor | None = None
    """A score per head that takes its share of the softmax and carries no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP:
    gate_up: Packed
    """[2 I, M]: the rows of gate, then those of up."""
    down: Packed
    """[M, I]."""
    activation: Activation
    gate_up_bias_N: Tensor | None = None
    down_bias_M: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMLP:
    """Experts of which each token visits `top_k`; E of everything below."""

    router: Packed
    """[E, M], dense."""
    router_bias_E: Tensor | None
    top_k: int
    renormalize: bool
    """The shares of the visited experts add up to 1; otherwise they are what softmax over all E gave them."""
    experts: tuple[DenseMLP, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """x += after_attention(out(attention(qkv(norm(x))))), then x += after_mlp(mlp(norm(x))); the after-norms are often
    absent. Norm weights are float32 and whole factors: a family that stores w - 1 has it added at load."""

    attention: AttentionLayer
    attention_norm_M: Tensor
    qkv: Packed
    """[(H + 2 J) D, M]: rows of q, k, v."""
    qkv_bias_N: Tensor | None
    out: Packed
    """[M, H D]."""
    out_bias_M: Tensor | None
    after_attention_norm_M: Tensor | None
    mlp_norm_M: Tensor
    mlp: DenseMLP | RoutedMLP
    after_mlp_norm_M: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole model, packed for one backend."""

    embedding: Packed
    """[vocab, M]; the same object as `head` where the two are tied."""
    embedding_scale: float
    """Embedded tokens are multiplied by it."""
    layers: tuple[DecoderLayer, ...]
    norm_M: Tensor
    norm_eps: float
    """Of every RMSNorm over M."""
    head: Packed
    """[vocab, M]."""
    softcap: float | None
    """Of the logits; None for none."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices; shared ones count once."""
        matrices: dict[int, Packed] = {id(self.embedding): self.embedding, id(self.head): self.head}
        for layer in self.layers:
            mlps = layer.mlp.experts if isinstance(layer.mlp, RoutedMLP) else (layer.mlp,)
            extra = (layer.mlp.router,) if isinstance(layer.mlp, RoutedMLP) else ()
            for matrix in (layer.qkv, layer.out, *extra, *(m for mlp in mlps for m in (mlp.gate_up, mlp.down))):
                matrices[id(matrix)] = matrix
        return sum(matrix.num_bytes for matrix in matrices.values())
