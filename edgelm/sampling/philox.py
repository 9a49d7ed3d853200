"""Random numbers by position: Philox4x32-10, a function and not a state.

Owns the generator. Knows nothing of logits: a caller gives the seed of a request, the position of a token and the
number of the choice, and gets the same number on every machine, in any order, with speculation on or off.
"""

from __future__ import annotations

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return the four 32-bit words of Philox4x32-10 for a counter and a key, both in 32-bit words.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), section 3.3. The words come in the order of
    `tl.philox` with 32-bit counters.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    s0, s1 = _KEY_STEPS
    for _ in range(_ROUNDS):
        p0 = m0 * c0
        p1 = m1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + s0) & _LOW
        k1 = (k1 + s1) & _LOW
    return c0, c1, c2, c3


def uniform(seed: int, position: int, choice: int) -> float:
    """Return a multiple of 2**-24 in [0, 1) for a 64-bit seed, a position and the number of a choice.

    The key is the seed (low word first), the counter (position, choice, 0, 0); the number is the upper 24 bits of
    word 0. This is not `tl.rand`, which takes 31 bits and another range.
    """
    assert 0 <= seed < 2**64, seed
    assert 0 <= position < 2**32, position
    assert 0 <= choice < 2**32, choice
    word, _, _, _ = philox((position, choice, 0, 0), (seed & _LOW, seed >> 32))
    return (word >> 8) * 2.0**-24
