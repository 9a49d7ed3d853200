"""ChainDrafter: several drafters, of which the first that has something to propose does.

Owns the order. Knows nothing of how any of them drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from edgelm.core import Drafter, Sequence


class ChainDrafter:
    """A `Drafter` over others; what becomes of a draft is told to the one that made it."""

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._author: dict[int, Drafter] = {}  # by sequence

    def begin(self, seq: Sequence) -> None:
        for drafter in self._drafters:
            drafter.begin(seq)

    def propose(self, seq: Sequence, marginal_cost: Seq[float]) -> list[int]:
        for drafter in self._drafters:
            draft = drafter.propose(seq, marginal_cost)
            if draft:
                self._author[seq.id] = drafter
                return draft
        return []

    def stake(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        return max(drafter.stake(seq, marginal_cost) for drafter in self._drafters)

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._author[seq.id].observe(seq, drafted, accepted)

    def end(self, seq: Sequence) -> None:
        self._author.pop(seq.id, None)
        for drafter in self._drafters:
            drafter.end(seq)

    def work(self, seconds: float) -> bool:
        left = [drafter.work(seconds / len(self._drafters)) for drafter in self._drafters]  # each has its turn
        return any(left)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
