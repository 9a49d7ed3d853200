"""The search for the types of a model's matrices that fit a budget, by measured divergences.

    group of matrices ── alone in each probe type ──> divergence        (sensitivity.py)
                      ── in each candidate type ────> rounding error
    divergence of a type = the group's curve through its probes, at the type's rounding error
    sum over the groups  ── least within the budget ──> types           (budget.py)

Divergences do not quite add up. Measuring each group again beside the chosen types of all others, and choosing once
more, found nothing better (docs/results/quantize-auto-2026-11-23.txt). Owns the curve. Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgelm.checkpoints.gguf_parse import TensorType
from edgelm.making.quantization.budget import Choice, choose
from edgelm.making.quantization.candidates import Group, with_importance
from edgelm.making.quantization.sensitivity import Laboratory

LEAST_DIVERGENCE = 1e-9  # of a probe: below it there is only rounding
STEEPEST, FLATTEST = 2.0, 0.3  # slopes of a curve; a small divergence goes with the squared error: 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The measurement that begins."""

    stage: str
    done: int
    total: int


class Solution(NamedTuple):
    """A type for each group, and the divergence of the model with all of them."""

    types: tuple[TensorType, ...]
    measured: float | None  # None: not measured
    predicted: tuple[float, ...]  # of each group


class Curve:
    """The divergence of a group by its rounding error: straight lines between its probes, both in logarithms.

    Below the probes the divergence goes with the squared error; above them the last line goes on.
    """

    def __init__(self, probes: Iterable[tuple[float, float]]) -> None:
        self._points = sorted(
            (math.log(error), math.log(max(divergence, LEAST_DIVERGENCE))) for error, divergence in probes if error > 0
        )

    def __call__(self, error: float) -> float:
        if error <= 0 or not self._points:
            return 0.0
        x, (first, height) = math.log(error), self._points[0]
        if x <= first or len(self._points) == 1:
            return math.exp(min(height + x - first, 690.0))
        pairs = list(zip(self._points, self._points[1:], strict=False))
        low, high = next((pair for pair in pairs if x <= pair[1][0]), pairs[-1])
        slope = (high[1] - low[1]) / max(high[0] - low[0], 1e-9)
        slope = min(max(slope, FLATTEST), STEEPEST)
        return math.exp(min(low[1] + slope * (x - low[0]), 690.0))


class Search:
    """The search over some groups. `important` are the names of the tensors with importance data."""

    def __init__(
        self,
        laboratory: Laboratory,
        groups: Sequence[Group],
        important: Collection[str],
        progress: Callable[[Progress], object],
        num_probes: int = 2,
    ) -> None:
        self.groups = groups
        self._num_probes = num_probes
        self._laboratory = laboratory
        self._progress = progress
        self.kinds = [_kinds(group, important) for group in groups]
        self.probes: list[dict[str, float]] = []  # divergences of each group alone, by type
        self._errors: list[dict[str, float]] = []
        self._curves: list[Curve] = []

    @property
    def least_bytes(self) -> int:
        """The size of all groups in their smallest types."""
        return sum(min(map(group.nbytes, kinds)) for group, kinds in zip(self.groups, self.kinds, strict=True))

    def measure(self) -> None:
        """Measure the rounding errors of all types, and the divergences of the probes."""
        for done, (group, kinds) in enumerate(zip(self.groups, self.kinds, strict=True)):
            self._progress(Progress(stage="rounding errors", done=done, total=len(self.groups)))
            self._errors.append({kind.name: self._error(group, kind) for kind in {*kinds, *group.probes}})
            self._laboratory.save()
        total = sum(len(group.probes[: self._num_probes]) for group in self.groups)
        done = 0
        for group, errors in zip(self.groups, self._errors, strict=True):
            self.probes.append({})
            for kind in group.probes[: self._num_probes]:
                self._progress(Progress(stage="sensitivity", done=done, total=total))
                self.probes[-1][kind.name] = self._laboratory.divergence(_types([group], [kind]))
                done += 1
            self._curves.append(Curve((errors[name], value) for name, value in self.probes[-1].items()))

    def solve(self, budget: int, *, check: bool) -> Solution:
        """Return the types with the least predicted divergence whose sizes are together at most `budget`.

        `check` measures them together.
        """
        choices = [
            [Choice(group.nbytes(kind), curve(errors[kind.name])) for kind in kinds]
            for group, kinds, curve, errors in zip(self.groups, self.kinds, self._curves, self._errors, strict=True)
        ]
        indexes = choose(choices, budget)
        kinds = tuple(kinds[index] for kinds, index in zip(self.kinds, indexes, strict=True))
        predicted = tuple(row[index].cost for row, index in zip(choices, indexes, strict=True))
        if check:
            self._progress(Progress(stage="all types together", done=0, total=1))
        measured = self._laboratory.divergence(_types(self.groups, kinds)) if check else None
        return Solution(kinds, measured, predicted)

    def _error(self, group: Group, kind: TensorType) -> float:
        return sum(self._laboratory.error(tensor, kind) for tensor in group.tensors)


def _types(groups: Sequence[Group], kinds: Sequence[TensorType]) -> Mapping[str, str]:
    """Return the types of the tensors that differ from the source."""
    return {
        tensor.name: kind.name
        for group, kind in zip(groups, kinds, strict=True)
        for tensor in group.tensors
        if kind.name != tensor.type.name
    }


def _kinds(group: Group, important: Collection[str]) -> tuple[TensorType, ...]:
    """Return the types that a group may get: no larger ones than it has, and those."""
    own = {tensor.type for tensor in group.tensors}
    now = sum(tensor.nbytes for tensor in group.tensors)
    kinds = [kind for kind in (*with_importance(group, important), *group.kinds) if group.nbytes(kind) < now]
    return (*kinds, *own) if len(own) == 1 else tuple(kinds)
