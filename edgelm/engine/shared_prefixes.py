"""Shared prefixes: what several conversations begin with, as the system prompt and the tools of an agent.

Owns the points where sequences left a known prefix, and which shared prefixes are evicted last. An agent's sessions all
leave its prompt at the same point, the turns of one session at another point each time. So the second sequence that
leaves at a point shows that the prefix is shared. Knows nothing of where a prefix is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgelm.engine.prefixes import MIN_PREFIX_LEN, PrefixIndex, Tokens

MAX_POINTS = 64
SHARED_SHARE = 0.25  # of the limit of all prefixes, for the shared ones of a namespace (setting prefix_cache_shared)

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Point:
    """A sequence left a longer one behind these tokens."""

    tokens: Tokens
    cache_namespace: str


class BranchPoints:
    """The last points where sequences left a known prefix of at least `min_len` tokens."""

    def __init__(self, min_len: int) -> None:
        self._points: PrefixIndex[_Point] = PrefixIndex()
        self._min_len = min_len

    def is_shared(self, cache_namespace: str, prefix: Tokens) -> bool:
        """Note that a sequence leaves a longer one behind `prefix`; tell whether another one left there before.

        Two questions may begin with the same words by chance, so a few tokens more or less are the same point.
        """
        if len(prefix) < self._min_len:
            return False
        for point, common in self._points.matches(cache_namespace, prefix):
            shorter, longer = sorted((len(point.tokens), len(prefix)))
            if common == shorter and longer - shorter <= MIN_PREFIX_LEN:
                self._points.touch(point)
                return True
        self._points.add(_Point(prefix, cache_namespace))
        if len(self._points) > MAX_POINTS:
            self._points.remove(next(iter(self._points)))
        return False


class SharedChains:
    """Shared prefixes as chains of digests of blocks; `last` are the digests of the blocks that are evicted last.

    Those of a namespace are at most `limit` blocks. A chain stays known while its blocks come and go.
    """

    def __init__(self, limit: int) -> None:
        self.last: frozenset[bytes] = frozenset()
        self._limit = limit
        self._chains: dict[bytes, tuple[str, tuple[bytes, ...]]] = {}  # by the last digest; least recently used first

    def use(self, digests: Sequence[bytes]) -> None:
        """Note that a sequence begins with these blocks."""
        used = [digest for digest in digests if digest in self._chains]
        if used != list(self._chains)[len(self._chains) - len(used) :]:
            for digest in used:
                self._chains[digest] = self._chains.pop(digest)
            self._choose_last()

    def add(self, cache_namespace: str, digests: Sequence[bytes]) -> None:
        """Note that several sequences begin with these blocks."""
        self._chains[digests[-1]] = (cache_namespace, tuple(digests))
        if len(self._chains) > MAX_POINTS:
            del self._chains[next(iter(self._chains))]
        self._choose_last()

    def kept(self) -> Iterator[tuple[bytes, ...]]:
        """Yield the chains that are evicted last, last used first."""
        return (chain for _, chain in reversed(self._chains.values()) if chain[-1] in self.last)

    def _choose_last(self) -> None:
        """Count a block that several chains begin with once."""
        counted: set[bytes] = set()
        sized: list[tuple[tuple[bytes, ...], str, int]] = []
        for cache_namespace, chain in reversed(self._chains.values()):
            sized.append((chain, cache_namespace, len(set(chain) - counted)))
            counted.update(chain)
        last = frozenset(digest for chain in kept_longest(sized, self._limit) for digest in chain)
        if last != self.last:
            self.last = last


def kept_longest(shared: Iterable[tuple[T, str, int]], limit: int) -> set[T]:
    """Return which shared prefixes are evicted last, of those with their namespaces and sizes, last used first.

    Those of a namespace have at most the size `limit` together.
    """
    used: Counter[str] = Counter()
    kept = set()
    for prefix, cache_namespace, size in shared:
        used[cache_namespace] += size
        if used[cache_namespace] <= limit:
            kept.add(prefix)
    return kept
