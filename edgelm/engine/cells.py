"""Counts the cells of a KV cache in which slots share prefixes, as llama.cpp's unified cache does.

Owns arithmetic only: a cell is used while any slot holds it, and no call of llama.cpp tells how many are free.
Knows nothing of tokens, sequences or what is worth keeping.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Span:
    """Consecutive positions whose cells are held by the same slots."""

    length: int
    holders: int = 1


class Cells:
    """Which slot holds how many positions, and how many cells that takes."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self._spans: list[list[_Span]] = [[] for _ in range(num_slots)]
        self._lengths = [0] * num_slots
        self._used = 0
        self.capacity = capacity

    @property
    def free(self) -> int:
        return self.capacity - self._used

    def length(self, slot: int) -> int:
        """Return how many positions a slot holds."""
        return self._lengths[slot]

    def extend(self, slot: int, count: int) -> None:
        """Give a slot `count` cells of its own behind those it has."""
        assert 0 <= count <= self.free
        spans = self._spans[slot]
        if spans and spans[-1].holders == 1:
            spans[-1].length += count
        elif count:
            spans.append(_Span(count))
        self._lengths[slot] += count
        self._used += count

    def trim(self, slot: int, length: int) -> None:
        """Take from a slot all positions from `length` on; cells that nobody else holds become free."""
        assert 0 <= length <= self._lengths[slot]
        self._cut(slot, length)
        spans = self._spans[slot]
        excess = self._lengths[slot] - length
        while excess:
            span = spans.pop()
            excess -= span.length
            span.holders -= 1
            if span.holders == 0:
                self._used -= span.length
        self._lengths[slot] = length

    def share(self, src: int, dst: int, length: int) -> None:
        """Let the empty slot `dst` hold the first `length` positions of `src` too."""
        assert self._lengths[dst] == 0
        assert 0 <= length <= self._lengths[src]
        self._merge(src)
        self._cut(src, length)
        rest = length
        for span in self._spans[src]:
            if rest == 0:
                break
            span.holders += 1
            self._spans[dst].append(span)
            rest -= span.length
        self._lengths[dst] = length

    def _merge(self, slot: int) -> None:
        """Join neighbours that only this slot holds any more, so that borders of old forks do not pile up."""
        merged: list[_Span] = []
        for span in self._spans[slot]:
            if merged and merged[-1].holders == span.holders == 1:
                merged[-1].length += span.length
            else:
                merged.append(span)
        self._spans[slot] = merged

    def _cut(self, slot: int, length: int) -> None:
        """Make `length` a border between spans, for every slot that holds the span across it."""
        start = 0
        for span in self._spans[slot]:
            if start < length < start + span.length:
                head, tail = _Span(length - start, span.holders), _Span(start + span.length - length, span.holders)
                for spans in self._spans:
                    if span in spans:
                        at = spans.index(span)
                        spans[at : at + 1] = [head, tail]
                return
            start += span.length
