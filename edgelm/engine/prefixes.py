"""PrefixIndex: which of many kept prefixes a prompt begins with, and in which order they were used.

Owns the comparison of tokens. Knows nothing of where the KV of a prefix is, or what it costs to bring it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

MIN_PREFIX_LEN = 32  # shorter prefixes are computed again faster than they are kept


class Kept(Protocol):
    """A prefix that is kept somewhere. What one owner wrote serves no other."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def owner(self) -> str: ...


T = TypeVar("T", bound=Kept)


class PrefixIndex(Generic[T]):
    """Prefixes of at least MIN_PREFIX_LEN tokens, least recently used first.

    They are grouped by owner and by their first tokens, so that a prompt is compared only with what may serve it.
    """

    def __init__(self) -> None:
        self._all: dict[T, None] = {}
        self._groups: dict[tuple[str, bytes], dict[T, None]] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, prefix: T) -> None:
        assert len(prefix.tokens) >= MIN_PREFIX_LEN
        self._all[prefix] = None
        self._groups.setdefault(_group(prefix.owner, prefix.tokens), {})[prefix] = None

    def remove(self, prefix: T) -> None:
        del self._all[prefix]
        group = _group(prefix.owner, prefix.tokens)
        del self._groups[group][prefix]
        if not self._groups[group]:
            del self._groups[group]

    def touch(self, prefix: T) -> None:
        """Make a prefix the one that was used last."""
        self.remove(prefix)
        self.add(prefix)

    def matches(self, owner: str, tokens: Tokens) -> Iterator[tuple[T, int]]:
        """Yield what begins as `tokens` do, with how many tokens are equal, the last used first."""
        for prefix in reversed(self._groups.get(_group(owner, tokens), {})):
            yield prefix, common_len(prefix.tokens, tokens)


def common_len(a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens are equal."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def common_prefix_len(a: list[int], b: list[int]) -> int:
    """Return how many leading tokens of two lists are equal, by slices: comparing them is fast, looping is not."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _group(owner: str, tokens: Tokens) -> tuple[str, bytes]:
    return owner, tokens[:MIN_PREFIX_LEN].tobytes()
