"""Several models judged on one text: a row for each, which of them others beat, and what follows for the choice.

    front      no other model is at most as large and closer to the reference

Owns these rows and the comparison by size and distance. Knows nothing of files, terminals and pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

AGREEMENTS = (0.99, 0.95, 0.90)  # of the next token: the steps of the advice
MAX_NAMED = 6
SEPARATOR = re.compile(r"[-.:/ ]")  # in names of models; _ is a part of Q4_K_M
LEAST_SHARE = 0.015  # of the bytes, below which a type is not named


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model. A figure that is not known is None; `problem` says why the model could not be evaluated."""

    name: str
    label: str  # short, and another for every row
    nbytes: int
    parameters: int = 0
    types: dict[str, int] | None = None  # bytes by the type of the tensors
    figures: dict[str, Any] | None = None  # as `edgelm eval --json` prints them
    prompt_speed: float | None = None  # tokens per second
    decode_speed: float | None = None
    decode_runs: tuple[float, ...] = ()  # whose median it is
    is_reference: bool = False
    problem: str = ""

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.nbytes / self.parameters if self.parameters else None

    @property
    def kl(self) -> float | None:
        """The mean KL divergence from the reference, in nats per token; 0 for the reference."""
        return self._figure("mean_kl", 0.0)

    @property
    def kl_error(self) -> float:
        return self._figure("mean_kl_stderr", 0.0) or 0.0

    @property
    def noise_floor(self) -> float | None:
        """The larger divergence from itself of the model and the reference; None: it was not measured."""
        floors = [side.get("noise_floor") for side in (self.figures or {}, (self.figures or {}).get("against") or {})]
        return max((floor["mean_kl"] for floor in floors if floor), default=None)

    @property
    def distinguishable(self) -> bool | None:
        """Whether the divergence from the reference is more than noise; None: that is not known."""
        return None if self.is_reference or not self.figures else self.figures.get("distinguishable")

    @property
    def same_top(self) -> float | None:
        """The share of tokens where the reference has the same most likely token."""
        return self._figure("top1_agreement", 1.0)

    @property
    def speed_spread(self) -> float:
        """The fastest run by the slowest one; 1 without a speed."""
        return max(self.decode_runs) / min(self.decode_runs) if self.decode_runs else 1.0

    @property
    def perplexity(self) -> float | None:
        return self.figures["perplexity"] if self.figures else None

    @property
    def main_types(self) -> str:
        """The types of the tensors with their shares of the bytes, such as "Q4_K 71 %, Q6_K 29 %"."""
        total = sum((self.types or {}).values())
        shares = [(kind, nbytes / total) for kind, nbytes in (self.types or {}).items() if total]
        shown = [(kind, share) for kind, share in shares if share >= LEAST_SHARE]
        if len(shown) == 1:
            return shown[0][0]
        return ", ".join(f"{kind} {share:.0%}".replace("%", " %") for kind, share in shown)

    def _figure(self, name: str, of_reference: float) -> float | None:
        if self.is_reference:
            return of_reference
        return self.figures[name] if self.figures else None


def by_size(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, the largest first."""
    return sorted(rows, key=lambda row: -row.nbytes)


def beats(one: Row, other: Row) -> bool:
    """Return whether a model is at most as large as another and closer to the reference, or smaller and as close.

    Two models that are not distinguishable from the reference are as close.
    """
    if one.kl is None or other.kl is None:
        return False
    kl, other_kl = ((0.0 if row.distinguishable is False else row.kl or 0.0) for row in (one, other))
    no_worse = one.nbytes <= other.nbytes and kl <= other_kl
    return no_worse and (one.nbytes < other.nbytes or kl < other_kl)


def beaten_by(row: Row, rows: Iterable[Row]) -> Row | None:
    """Return the closest to the reference of the models that beat one; None: it is on the front."""
    better = [other for other in rows if beats(other, row)]
    return min(better, key=lambda other: (other.kl or 0.0, other.nbytes), default=None)


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other beats, the smallest first: the Pareto front."""
    measured = [row for row in rows if row.kl is not None]
    return sorted((row for row in measured if beaten_by(row, measured) is None), key=lambda row: row.nbytes)


def advice(rows: Sequence[Row], reference: str) -> list[str]:
    """Return short lines of advice which model to choose; none unless all rows have the same reference."""
    if not any(row.is_reference for row in rows):
        return []
    judged = [row for row in rows if row.kl is not None and not row.is_reference]
    lines = []
    beaten: dict[str, list[str]] = {}
    for row in judged:
        if (other := beaten_by(row, judged)) is not None:
            beaten.setdefault(other.label, []).append(row.label)
    if beaten:
        pairs = [f"{label} than {_joined(others)}" for label, others in beaten.items()]
        lines.append(f"no larger, and no farther from {reference}: {'; '.join(pairs)}")
    smallest: dict[str, float] = {}
    for share in AGREEMENTS:
        good = [row for row in judged if (row.same_top or 0.0) >= share]
        if good and len(judged) > 1:
            smallest.setdefault(min(good, key=lambda row: row.nbytes).label, share)
    steps = [f"for {share:.0%}: {label}".replace("%", " %") for label, share in smallest.items()]
    if steps:
        lines.append(f"the smallest with {reference}'s next token {'; '.join(steps)}")
    return lines


def _joined(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - MAX_NAMED} more" if len(labels) > MAX_NAMED else ""
    return ", ".join(labels[:MAX_NAMED]) + more


def short_labels(names: Sequence[str]) -> tuple[str, list[str]]:
    """Split names into their common beginning, up to a separator, and their endings, none of which is empty."""
    if len(names) < 2:
        return "", list(names)
    least, greatest = min(names), max(names)  # what these begin with, all others do
    same = next((i for i, char in enumerate(least) if greatest[i : i + 1] != char), len(least))
    common = least[:same]
    ends = [match.end() for match in SEPARATOR.finditer(common)]
    end = max((end for end in ends if not all(name[end : end + 1].isdigit() for name in names)), default=0)
    rests = [name[end:] for name in names]
    return (common[:end], rests) if all(rests) else ("", list(names))
