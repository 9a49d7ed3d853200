"""The sums of an evaluation: of bounded size however long the text, and written and read back without loss.

Owns means, standard errors and quantiles. Knows nothing of models.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from edgelm.evaluation.scores import Floats, Scores

_BIN_RATIO = math.log(1.001)  # a quantile of the divergence is within 0.05 percent
_LEAST = 1e-15  # of a divergence: less is rounding


@dataclass(slots=True)
class Moments:
    """Count, mean, and sum of squared differences from the mean.

    Parts are joined as in Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample
    variances (1979), which loses no digits to cancellation.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Floats) -> None:
        if not values.size:
            return
        total = self.count + values.size
        mean = float(values.mean())
        delta = mean - self.mean
        self.squares += float(((values - mean) ** 2).sum()) + delta**2 * self.count * values.size / total
        self.mean += delta * values.size / total
        self.count = total

    @property
    def error(self) -> float:
        """The standard error of the mean, as if the values were independent; 0 for fewer than two."""
        return math.sqrt(self.squares / self.count / (self.count - 1)) if self.count > 1 else 0.0


@dataclass(slots=True)
class Tally:
    """What is known after some windows. Everything but `surprise` is of a comparison with a reference."""

    windows: int = 0
    surprise: Moments = field(default_factory=Moments)
    reference_surprise: Moments = field(default_factory=Moments)
    difference: Moments = field(default_factory=Moments)  # of the surprises, model less reference
    divergence: Moments = field(default_factory=Moments)
    bins: dict[int, int] = field(default_factory=dict)  # how many divergences have which logarithm
    max_divergence: float = 0.0
    same_top: int = 0

    def add(self, scores: Scores) -> None:
        """Take the scores of one window."""
        self.windows += 1
        self.surprise.add(scores.surprise)
        if not scores.divergence.size:
            return
        self.reference_surprise.add(scores.reference_surprise)
        self.difference.add(scores.surprise - scores.reference_surprise)
        self.divergence.add(scores.divergence)
        logs = np.log(np.maximum(scores.divergence, _LEAST)) / _BIN_RATIO
        for number, count in zip(*np.unique(np.floor(logs).astype(int), return_counts=True), strict=True):
            self.bins[int(number)] = self.bins.get(int(number), 0) + int(count)
        self.max_divergence = max(self.max_divergence, float(scores.divergence.max()))
        self.same_top += int(scores.same_top.sum())

    def divergence_quantile(self, share: float) -> float:
        """Return the divergence that `share` of the tokens do not exceed, interpolated between neighbours."""
        place = share * (self.divergence.count - 1)
        low, high = (self._ranked(rank) for rank in (math.floor(place), math.ceil(place)))
        return low + (high - low) * (place % 1)

    def _ranked(self, rank: int) -> float:
        seen = 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen > rank:
                return math.exp((number + 0.5) * _BIN_RATIO)
        raise AssertionError(f"rank {rank} of {seen}")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it, where the keys of `bins` become text; floats keep every digit."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return what `to_json` gave. Raises ValueError, TypeError or KeyError for anything else."""
        fresh = cls()
        moments = {name: Moments(**data[name]) for name in data if isinstance(getattr(fresh, name, None), Moments)}
        bins = {int(number): int(count) for number, count in data["bins"].items()}
        tally = cls(**data | moments | {"bins": bins})
        if tally.windows < 0 or any(each.count < 0 for each in moments.values()):
            raise ValueError("a count is negative")
        return tally
