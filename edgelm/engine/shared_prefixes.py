"""Shared prefixes: what several conversations begin with, as the system prompt and the tools of an agent.

Owns the points where sequences left a known prefix, and which shared prefixes are evicted last. An agent's sessions all
leave its prompt at the same point, the turns of one session at another point each time. So the second sequence that
leaves at a point shows that the prefix is shared. Knows nothing of where a prefix is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from edgelm.engine.prefixes import MIN_PREFIX_LEN, PrefixIndex, Tokens

MAX_POINTS = 64
SHARED_SHARE = 4  # the shared prefixes of a namespace are evicted last, up to this part of the limit of all prefixes

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


def kept_longest(shared: Iterable[tuple[T, str, int]], limit_bytes: int) -> set[T]:
    """Return which shared prefixes are evicted last, of those with their namespaces and bytes, last used first."""
    used: Counter[str] = Counter()
    kept = set()
    for prefix, cache_namespace, nbytes in shared:
        used[cache_namespace] += nbytes
        if used[cache_namespace] * SHARED_SHARE <= limit_bytes:
            kept.add(prefix)
    return kept
