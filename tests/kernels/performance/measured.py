"""Measured times of a step's nodes beside their simulated ones.

Owns which measured node is which simulated one, and the table. A measured time is that of a call of many in a CUDA
graph, so it has one gap between nodes in it: the simulated time beside it has one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from tests.kernels.performance.budget import Budget, Row
from tests.kernels.performance.recording import name_of
from tests.kernels.performance.step import Part

MeasurePart = Callable[[Part, list[float]], Sequence[float | None]]  # us of each node, given the bytes that it reads


class Line(NamedTuple):
    """A node: simulated, measured, or both."""

    part: str
    times: int
    name: str
    simulated_us: float | None  # with the gap behind it
    measured_us: float | None
    bound: str
    launched: bool  # here

    @property
    def ratio(self) -> float | None:
        """How many times as long it takes here as in the model: 1 is exact, more means that the model is too fast."""
        return self.measured_us / self.simulated_us if self.measured_us and self.simulated_us else None


def lines_of(budget: Budget | None, parts: Sequence[Part], measure: MeasurePart) -> Iterator[Line]:
    """Yield the nodes of a step, in order; without a budget, nothing is simulated."""
    for part in parts:
        rows = [row for row in budget.rows if row.part == part.name] if budget else []
        pairs = list(pairs_of([_kernel(row) for row in rows], [name_of(node) for node in part.nodes]))
        read = [0.0] * len(part.nodes)
        for row, node in pairs:
            estimate = rows[row].estimate if row is not None else None
            if node is not None and estimate is not None:
                read[node] = estimate.counts.dram_bytes
        times = measure(part, read)
        for row, node in pairs:
            measured = times[node] if node is not None else None
            if row is None or budget is None:
                assert node is not None
                yield Line(part.name, part.times, name_of(part.nodes[node]), None, measured, "", launched=True)
                continue
            one = rows[row]
            bound = one.estimate.bound if one.estimate else "latency"
            simulated = one.us + budget.gap_us(one)
            yield Line(part.name, part.times, one.name, simulated, measured, bound, launched=node is not None)


def _kernel(row: Row) -> str:
    return row.estimate.name if row.estimate else row.name


def pairs_of(simulated: list[str], measured: list[str]) -> Iterator[tuple[int | None, int | None]]:
    """Yield which node is which, by the kernels' names in order; None where only one side has a node."""
    matcher = SequenceMatcher(None, simulated, measured, autojunk=False)
    row = node = 0
    for block in matcher.get_matching_blocks():
        yield from ((at, None) for at in range(row, block.a))
        yield from ((None, at) for at in range(node, block.b))
        yield from ((block.a + at, block.b + at) for at in range(block.size))
        row, node = block.a + block.size, block.b + block.size


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the nodes with their ratio, and the sums."""
    yield f"{'times':>5} {'kernel':<38} {'simulated us':>13} {'measured us':>12} {'ratio':>6} bound"
    part = ""
    for line in lines:
        if line.part != part:
            part = line.part
            yield f"-- {part}, {line.times} times" if line.times > 1 else f"-- {part}"
        simulated = _number(line.simulated_us, "13.2f", "not simulated")
        measured = _number(line.measured_us, "12.2f", "not measured" if line.launched else "not launched")
        ratio = _number(line.ratio, "6.2f", "-")
        yield f"{line.times:5d} {line.name:<38} {simulated} {measured} {ratio} {line.bound}".rstrip()
    same = sum(line.launched and line.simulated_us is not None for line in lines)
    yield f"nodes: {sum(line.launched for line in lines)} launched here, {same} of them simulated"
    both = [line for line in lines if line.ratio]
    if both:
        model = sum(line.times * (line.simulated_us or 0.0) for line in both) / 1e3
        here = sum(line.times * (line.measured_us or 0.0) for line in both) / 1e3
        yield f"nodes that have both: simulated {model:.3f} ms, measured {here:.3f} ms, ratio {here / model:.2f}"


def _number(value: float | None, form: str, missing: str) -> str:
    width = int(form.partition(".")[0])
    return format(value, form) if value is not None else f"{missing:>{width}}"
