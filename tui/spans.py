"""Parts of a text that grows: which of its characters were drafted.

Owns their order. Knows nothing of where they come from and how they look.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

Span = tuple[int, int]  # first character, and the one behind the last


class Spans:
    """Spans that do not overlap, in order; those that touch are one."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.add(spans)

    def __bool__(self) -> bool:
        return bool(self._begins)

    def __iter__(self) -> Iterator[Span]:
        return zip(self._begins, self._ends, strict=True)

    def add(self, spans: Iterable[Span], offset: int = 0) -> None:
        """Add spans behind the last; `offset` is added to each end of theirs."""
        for begin, end in spans:
            if self._ends and self._ends[-1] >= begin + offset:
                self._ends[-1] = end + offset
            else:
                self._begins.append(begin + offset)
                self._ends.append(end + offset)

    def within(self, begin: int, end: int) -> list[Span]:
        """Return what of the spans lies in a part of the text, counted from its beginning."""
        found: list[Span] = []
        for i in range(bisect_right(self._ends, begin), len(self._begins)):
            if self._begins[i] >= end:
                break
            found.append((max(self._begins[i], begin) - begin, min(self._ends[i], end) - begin))
        return found
