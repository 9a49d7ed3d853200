"""The generator against Random123's known answers, and its numbers against what uniform and independent ones do."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgelm.sampling.philox import Words, philox, uniform
from tests.counts import Count

NUM_DRAWS = Count(test=20_000, soak=1_000_000)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: Words, key: tuple[int, int], words: Words) -> None:
    assert philox(counter, key) == words


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_uniform_is_the_upper_24_bits_of_word_0(seed: int, position: int, choice: int) -> None:
    word = philox((position, choice, 0, 0), (seed % 2**32, seed // 2**32))[0]
    u = uniform(seed, position, choice)
    assert 0 <= u < 1
    assert u * 2**24 == word // 256


def test_numbers_are_uniform_and_streams_are_independent() -> None:
    seed = secrets.randbits(64)
    print("seed", seed)
    streams = {
        "choice 0": [uniform(seed, i, 0) for i in range(NUM_DRAWS)],
        "choice 1": [uniform(seed, i, 1) for i in range(NUM_DRAWS)],
        "next position": [uniform(seed, i + 1, 0) for i in range(NUM_DRAWS)],
        "next seed": [uniform((seed + 1) % 2**64, i, 0) for i in range(NUM_DRAWS)],
        "upper half of the seed": [uniform(seed ^ 1 << 40, i, 0) for i in range(NUM_DRAWS)],
    }
    for name, numbers in streams.items():
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        statistic = float(((counts - NUM_DRAWS / 64) ** 2).sum() / (NUM_DRAWS / 64))
        assert statistic < 150, (name, statistic)  # 63 degrees of freedom: passed by chance once in 2e8
    correlations = np.corrcoef(list(streams.values()))
    assert np.abs(correlations - np.eye(len(streams))).max() < 6 / NUM_DRAWS**0.5, correlations
