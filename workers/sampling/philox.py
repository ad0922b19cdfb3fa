"""A counter-based random generator: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

The draw is a pure function of (seed, choice, position): the same on any worker, in any batch, after any preemption or
migration. Integers only, so it is exact everywhere.
"""

_MASK = (1 << 64) - 1
_MULTIPLY_0, _MULTIPLY_1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL_0, _WEYL_1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 64-bit words for this counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = _MULTIPLY_0 * c0, _MULTIPLY_1 * c2
        c0, c1, c2, c3 = (product_1 >> 64) ^ c1 ^ k0, product_1 & _MASK, (product_0 >> 64) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def draw_uniform(seed: int, position: int, choice: int = 0) -> float:
    """A uniform in [0, 1) with 53 random bits for output token `position` of choice `choice` of a request's seed."""
    return (philox((position, choice, 0, 0), (seed, 0))[0] >> 11) * 2.0**-53
