"""PrefixIndex: finds the kept prefixes that a prompt begins with, and remembers the order of their last use.

Owns the comparison of tokens. Knows nothing of where the KV of a prefix is, or of the cost to bring it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgelm.engine.core import Snapshots, StoredPrefix

Tokens = NDArray[np.int32]

MIN_PREFIX_LEN = 32  # computing a shorter prefix again is faster than keeping it
MIN_STORED_LEN = 256  # a shorter prefix is not worth a file


class Kept(Protocol):
    """A prefix that is kept somewhere, for sequences of its own cache namespace."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def cache_namespace(self) -> str: ...


T = TypeVar("T", bound=Kept)


class PrefixIndex(Generic[T]):
    """Prefixes of at least MIN_PREFIX_LEN tokens, least recently used first.

    They are grouped by cache namespace and first tokens, so that a prompt is compared with few of them.
    """

    def __init__(self) -> None:
        self._by_last_use: dict[T, None] = {}
        self._groups: dict[tuple[str, bytes], dict[T, None]] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._by_last_use))

    def __len__(self) -> int:
        return len(self._by_last_use)

    def add(self, prefix: T) -> None:
        assert len(prefix.tokens) >= MIN_PREFIX_LEN
        self._by_last_use[prefix] = None
        self._groups.setdefault(_group(prefix.cache_namespace, prefix.tokens), {})[prefix] = None

    def remove(self, prefix: T) -> None:
        del self._by_last_use[prefix]
        group = _group(prefix.cache_namespace, prefix.tokens)
        del self._groups[group][prefix]
        if not self._groups[group]:
            del self._groups[group]

    def touch(self, prefix: T) -> None:
        """Make a prefix the most recently used one."""
        self.remove(prefix)
        self.add(prefix)

    def matches(self, cache_namespace: str, tokens: Tokens) -> Iterator[tuple[T, int]]:
        """Yield prefixes that begin as `tokens` do, with the number of equal tokens; most recently used first."""
        for prefix in reversed(self._groups.get(_group(cache_namespace, tokens), {})):
            yield prefix, common_len(prefix.tokens, tokens)


class FileIndex:
    """The prefixes in the files of a store, looked up by their tokens."""

    def __init__(self, store: Snapshots | None) -> None:
        self._store = store
        self._files: tuple[StoredPrefix, ...] = ()  # from which `_index` was made
        self._index: PrefixIndex[StoredPrefix] = PrefixIndex()

    def matches(self, cache_namespace: str, tokens: Tokens) -> Iterator[tuple[StoredPrefix, int]]:
        """Yield the present files as `PrefixIndex.matches` does."""
        files = self._store.files() if self._store else ()
        if files is not self._files:
            self._files, self._index = files, PrefixIndex()
            for file in files:
                if len(file.tokens) >= MIN_PREFIX_LEN:
                    self._index.add(file)
        return self._index.matches(cache_namespace, tokens)


def common_len(a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens of two arrays are equal."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def common_prefix_len(a: list[int], b: list[int]) -> int:
    """Return how many leading tokens of two lists are equal, by comparing slices: that is faster than a loop."""
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


def _group(cache_namespace: str, tokens: Tokens) -> tuple[str, bytes]:
    return cache_namespace, tokens[:MIN_PREFIX_LEN].tobytes()
