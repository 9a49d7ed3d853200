"""One choice for each of several groups, with the least cost that a budget of bytes allows.

Owns the search: a multiple-choice knapsack problem. Knows nothing of tensors and types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CELLS = 2**16  # of the table: each is a number of bytes


class Choice(NamedTuple):
    """A choice of a group: its size, and its cost, which is to be small."""

    nbytes: int
    cost: float


def choose(groups: Sequence[Sequence[Choice]], budget: int) -> list[int]:
    """Return the index of a choice for each group, so that their sizes fit the budget and their costs are least.

    Exact where the bytes above the smallest choices, in units of their common divisor, are at most 65,536; otherwise
    sizes are rounded up to a 65,536th of these bytes, and the rest is spent greedily. The smallest choices have to fit.
    """
    least = [min(choice.nbytes for choice in group) for group in groups]
    spare = budget - sum(least)
    assert spare >= 0, "the smallest choices do not fit"
    extra = [
        np.array([choice.nbytes - low for choice in group], np.int64) for group, low in zip(groups, least, strict=True)
    ]
    spare = min(spare, sum(int(sizes.max()) for sizes in extra))
    unit = max(int(np.gcd.reduce(np.concatenate(extra))) if extra else 1, -(-spare // CELLS), 1)
    num_cells = spare // unit + 1
    best = np.zeros(num_cells)  # the least cost of the groups so far, by the cells that they may take
    taken = []
    for group, sizes in zip(groups, extra, strict=True):
        costs = np.full((len(group), num_cells), np.inf)
        for index, (choice, cells) in enumerate(zip(group, -(-sizes // unit), strict=True)):
            if cells < num_cells:
                costs[index, cells:] = best[: num_cells - cells] + choice.cost
        taken.append(costs.argmin(axis=0).astype(np.int16))
        best = costs.min(axis=0)
    chosen = []
    cell = num_cells - 1
    for indexes, sizes in zip(reversed(taken), reversed(extra), strict=True):
        index = int(indexes[cell])
        chosen.append(index)
        cell -= int(-(-sizes[index] // unit))
    return _spend(groups, chosen[::-1], budget)


def _spend(groups: Sequence[Sequence[Choice]], chosen: list[int], budget: int) -> list[int]:
    """Spend what rounding left: take better choices that still fit, those that save most first."""
    left = budget - sum(group[index].nbytes for group, index in zip(groups, chosen, strict=True))
    while True:
        saved, place, index = max(
            (
                (group[chosen[place]].cost - choice.cost, place, index)
                for place, group in enumerate(groups)
                for index, choice in enumerate(group)
                if choice.nbytes - group[chosen[place]].nbytes <= left
            ),
            default=(0.0, 0, 0),
        )
        if saved <= 0:
            return chosen
        left -= groups[place][index].nbytes - groups[place][chosen[place]].nbytes
        chosen[place] = index
