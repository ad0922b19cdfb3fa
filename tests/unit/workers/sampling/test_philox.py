"""Our generator against numpy's Philox4x64-10, and what a draw depends on."""

import numpy as np
import pytest

from workers.sampling.philox import draw_uniform, philox


@pytest.mark.parametrize(
    ("counter", "key"),
    [((0, 0, 0, 0), (0, 0)), ((7, 1, 2, 3), (11, 13)), ((5, 0, 0, 2**64 - 1), (2**63 - 1, 2**64 - 1))],
)
def test_words_equal_numpys(counter, key) -> None:
    # numpy adds one to the counter before it draws its first four words.
    generator = np.random.Philox(counter=np.array(counter, np.uint64), key=np.array(key, np.uint64))
    expected = tuple(int(word) for word in generator.random_raw(4))
    assert philox((counter[0] + 1, *counter[1:]), key) == expected


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    draws = {(seed, position): draw_uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(set(draws.values())) == 1600
    assert all(0 <= value < 1 for value in draws.values())
    assert draw_uniform(3, 4) == draws[3, 4]
    assert draw_uniform(3, 4) != draws[4, 3]


def test_draws_are_uniform() -> None:
    counts, _ = np.histogram([draw_uniform(123, position) for position in range(20_000)], bins=20, range=(0, 1))
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8, "19 degrees of freedom, p = 0.001"
