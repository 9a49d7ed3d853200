"""From logits to the figures of an evaluation: the score of each token, and their tally.

Owns the formulas, and means, standard errors and quantiles. Scores are computed in float64 from float32 logits, in
blocks of rows that bound the memory. The size of a tally does not depend on the text's, and JSON keeps it without loss.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import EngineError

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]

BLOCK_NUMBERS = 2**20  # logits that are in float64 at a time
_BIN_RATIO = math.log(1.001)  # so that a quantile of the divergence is within 0.05 percent
NOISE_TIMES = 2  # a divergence of at most so many times the noise floor says nothing
MAX_LOG = 700.0  # exp of more overflows a float
_MIN_DIVERGENCE = 1e-15  # below this there is only rounding


class Scores(NamedTuple):
    """The scores of some tokens: [tokens] each. The last three need a reference, or are empty."""

    surprise: Floats  # -ln p(token), in nats
    reference_surprise: Floats
    divergence: Floats  # KL(reference || model), in nats
    same_top: NDArray[np.bool_]  # both sides have the same most likely token


def score(logits: Logits, targets: NDArray[np.int64], reference: Logits | None = None) -> Scores:
    """Score targets by the logits that predict them: [rows, vocab], [rows], [rows, vocab].

    Raises EngineError for logits that are not numbers.
    """
    height = max(1, BLOCK_NUMBERS // logits.shape[1])
    blocks = [slice(start, start + height) for start in range(0, len(targets), height)]
    parts = [_score(logits[rows], targets[rows], None if reference is None else reference[rows]) for rows in blocks]
    return join(parts)


def distinguishable(divergence: float, *floors: float) -> bool:
    """Return whether a mean divergence is more than twice the noise floors of the two sides, which may be 0."""
    return divergence > NOISE_TIMES * max(floors)


def join(parts: list[Scores]) -> Scores:
    """Return the scores of consecutive tokens as one."""
    return Scores(*map(np.concatenate, zip(*parts, strict=True)))


def log_softmax(logits: Logits) -> Floats:
    """Return ln p of each token. The largest logit is subtracted first, so that no exponential overflows."""
    shifted = logits.astype(np.float64)
    if not np.isfinite(shifted).all():
        raise EngineError("the model computed values that are not numbers", "its file may be damaged")
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _score(logits: Logits, targets: NDArray[np.int64], reference: Logits | None) -> Scores:
    rows = np.arange(len(targets))
    log_q = log_softmax(logits)  # [rows, vocab]
    surprise = -log_q[rows, targets]
    if reference is None:
        return Scores(surprise, np.empty(0), np.empty(0), np.empty(0, np.bool_))
    log_p = log_softmax(reference)
    same_top = logits.argmax(axis=1) == reference.argmax(axis=1)
    reference_surprise = -log_p[rows, targets]
    # KL(P || Q) = sum p (ln p - ln q), Kullback and Leibler 1951. It is not negative, but its rounding may be.
    log_q -= log_p
    divergence = np.maximum(-np.einsum("rv,rv->r", np.exp(log_p), log_q), 0)
    return Scores(surprise, reference_surprise, divergence, same_top)


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


def perplexity(surprise: Moments) -> float:
    """Return e to the mean surprise: Jelinek and others, Perplexity, a measure of difficulty of tasks (1977)."""
    return math.exp(min(surprise.mean, MAX_LOG))


@dataclass(slots=True)
class Tally:
    """The sums over some windows. All fields after `surprise` need a reference."""

    windows: int = 0
    surprise: Moments = field(default_factory=Moments)
    reference_surprise: Moments = field(default_factory=Moments)
    difference: Moments = field(default_factory=Moments)  # of the surprises, model minus reference
    divergence: Moments = field(default_factory=Moments)
    bins: dict[int, int] = field(default_factory=dict)  # histogram of the divergences by their logarithm
    max_divergence: float = 0.0
    same_top: int = 0

    def add(self, scores: Scores) -> None:
        """Add the scores of one window."""
        self.windows += 1
        self.surprise.add(scores.surprise)
        if not scores.divergence.size:
            return
        self.reference_surprise.add(scores.reference_surprise)
        self.difference.add(scores.surprise - scores.reference_surprise)
        self.divergence.add(scores.divergence)
        logs = np.log(np.maximum(scores.divergence, _MIN_DIVERGENCE)) / _BIN_RATIO
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
        """Return a JSON object. JSON turns the keys of `bins` into text; floats keep every digit."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Restore the result of `to_json`. Raises ValueError, TypeError or KeyError for anything else."""
        fresh = cls()
        moments = {name: Moments(**data[name]) for name in data if isinstance(getattr(fresh, name, None), Moments)}
        bins = {int(number): int(count) for number, count in data["bins"].items()}
        tally = cls(**data | moments | {"bins": bins})
        if tally.windows < 0 or any(moment.count < 0 for moment in moments.values()):
            raise ValueError("a count is negative")
        return tally
