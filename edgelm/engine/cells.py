"""Cells: counts the cells of a KV cache in which slots share prefixes, as llama.cpp's unified cache does.

Owns arithmetic only: a cell is used while any slot holds it, and llama.cpp has no call that tells how many are free.
Knows nothing of tokens, sequences or the value of a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Span:
    """Consecutive positions whose cells are held by the same slots."""

    length: int
    num_holders: int = 1


class Cells:
    """The number of positions of each slot, and of the used cells of all slots."""

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
        """Append `count` new cells to a slot."""
        assert 0 <= count <= self.free
        spans = self._spans[slot]
        if spans and spans[-1].num_holders == 1:
            spans[-1].length += count
        elif count:
            spans.append(_Span(count))
        self._lengths[slot] += count
        self._used += count

    def trim(self, slot: int, length: int) -> None:
        """Cut a slot to `length` positions; cells that no other slot holds become free."""
        assert 0 <= length <= self._lengths[slot]
        self._split(slot, length)
        spans = self._spans[slot]
        excess = self._lengths[slot] - length
        while excess:
            span = spans.pop()
            excess -= span.length
            span.num_holders -= 1
            if span.num_holders == 0:
                self._used -= span.length
        self._lengths[slot] = length

    def share(self, src: int, dst: int, length: int) -> None:
        """Let the empty slot `dst` hold the first `length` positions of `src` too."""
        assert self._lengths[dst] == 0
        assert 0 <= length <= self._lengths[src]
        self._merge(src)
        self._split(src, length)
        remaining = length
        for span in self._spans[src]:
            if remaining == 0:
                break
            span.num_holders += 1
            self._spans[dst].append(span)
            remaining -= span.length
        self._lengths[dst] = length

    def _merge(self, slot: int) -> None:
        """Join neighbouring spans that only this slot holds: otherwise the borders of old forks pile up."""
        merged: list[_Span] = []
        for span in self._spans[slot]:
            if merged and merged[-1].num_holders == span.num_holders == 1:
                merged[-1].length += span.length
            else:
                merged.append(span)
        self._spans[slot] = merged

    def _split(self, slot: int, length: int) -> None:
        """Make `length` a border between spans, in every slot that holds the span across it."""
        start = 0
        for span in self._spans[slot]:
            if start < length < start + span.length:
                head = _Span(length - start, span.num_holders)
                tail = _Span(start + span.length - length, span.num_holders)
                for spans in self._spans:
                    if span in spans:
                        at = spans.index(span)
                        spans[at : at + 1] = [head, tail]
                return
            start += span.length
