"""Small unsigned integers side by side in 32-bit words, lowest bits first."""

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack_words(words_AW: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """`[A, W * 32 / bits]` uint8 of an int32 `[A, W]`; `bits` divides 32 and is at most 8.

    `order[i]` is the place, within the numbers of a word, of the one in bits i * bits and up; None: in order.
    """
    per_word = 32 // bits
    found = torch.empty((*words_AW.shape, per_word), dtype=torch.uint8)
    for i, place in enumerate(order or range(per_word)):
        found[:, :, place] = (words_AW >> (bits * i)) & ((1 << bits) - 1)
    return found.flatten(1)
