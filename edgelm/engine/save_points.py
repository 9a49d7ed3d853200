"""Where to save the state of a sequence whose cache cannot be cut, and which saved states are dispensable.

Such a cache (recurrent states, hybrids of them, sliding windows) serves another prompt only as a whole: its tokens must
be a prefix of the prompt. So states are saved on the way, at positions where another prompt may go on otherwise:

    system, tools │ question │ start of the answer │ thought, answer │ next question …
                  1          2                     3                 4

    1  where another prompt is known to differ      3  before the tokens that start the answer: a retry, and templates
    2  every STRIDE tokens of a long prompt            that omit the thoughts of earlier turns
                                                    4  the end of a turn, before the next one overwrites it

Owns integers only. Knows nothing of slots, snapshots or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

STRIDE = 2048
MIN_GAIN_LEN = 64  # a state that saves fewer tokens than that is not worth a step and its bytes
ANSWER_START_LEN = 16  # longer than the tokens with which templates start an answer
REACH = 4  # by how much the distances of two states may differ, if room is short
SAVED_SHARE = 4  # a state on the way takes at most this part of the room, so that it does not replace all others


def save_points(computed: int, prompt_len: int, shared: int, kept: Iterable[int]) -> list[int]:
    """Return the positions from `computed` on at which to save a sequence's state, ascending.

    `shared` tokens are also the beginning of another sequence; the states of the first `kept` tokens are saved already.
    """
    last = max(prompt_len - ANSWER_START_LEN, computed)
    strides = range(computed + STRIDE - computed % STRIDE, last, STRIDE)
    known = {0, *kept}
    points = []
    for point in sorted({computed, min(shared, prompt_len - 1), last, *strides}):
        if point >= computed and point - max(length for length in known if length <= point) >= MIN_GAIN_LEN:
            points.append(point)
            known.add(point)
    return points


def dispensable(length: int, others: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indexes of the states that can go first, because there is one of `length` tokens.

    `others` are the lengths of other states, and how many of their tokens that one has too. Without the dispensable
    ones, a prompt that differs d tokens before its end computes at most REACH times d tokens again, if it did before.
    States at which another prompt differs are not dispensable.
    """
    branches = {common for other, common in others if common < other}
    prefixes = [index for index, (other, common) in enumerate(others) if common == other < length]
    prefixes.sort(key=lambda index: others[index][0], reverse=True)
    older = [length - others[index][0] for index in prefixes[1:]] + [length]  # distance of the next one
    dropped, newer = [], 0
    for index, distance in zip(prefixes, older, strict=False):
        if distance <= REACH * newer and others[index][0] not in branches:
            dropped.append(index)
        else:
            newer = length - others[index][0]
    return dropped


class StateSizes:
    """Estimates the bytes of a state: a constant part, and one that grows with its tokens."""

    def __init__(self, token_bytes: int) -> None:
        self._shortest = self._longest = (0, 0)  # tokens and bytes of measured states
        self._token_bytes = token_bytes  # until one is measured

    def add(self, length: int, nbytes: int) -> None:
        """Take the measured size of a state."""
        self._longest = max(self._longest, (length, nbytes))
        self._shortest = min(self._shortest, (length, nbytes)) if self._shortest[0] else (length, nbytes)

    def estimate(self, length: int) -> int:
        (low, least), (high, most) = self._shortest, self._longest
        if not high:
            return length * self._token_bytes
        if low == high:
            return max(most, most * length // high)
        return max(least + (most - least) * (length - low) // (high - low), 0)
