"""The goals for a step's speed, and how far the simulated budgets are from them.

Owns the goals, what the validation says of a simulated time, and the reasons, which are counts of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.kernels.performance.budget import Budget, Row, weights_of
from tests.kernels.performance.step import SCENES
from tests.kernels.performance.validate import Compared, bias, judged

PLAIN, VERIFY_8, VERIFY_16, BATCH_16, DEEP = SCENES
TOKENS_PER_S = {"H100": 480, "H200": 560, "RTX 4090": 190}
STEPS = {VERIFY_8: 1.1, VERIFY_16: 1.2}  # plain steps
BATCH = 10.0  # times the tokens of one sequence
BANDWIDTH = 0.75  # of the data sheet's, in attention
ATTENTION = ("attend_chunks", "combine_chunks")

Budgets = Mapping[tuple[str, str], Budget]  # by the scene's name and the GPU's


class Band(NamedTuple):
    """The ratio of published to simulated times over some points: its geometric mean and its spread.

    Figures have that of all points, not of the kernels most like ours: none of those was measured on an H100 or H200.
    """

    slower: float  # published / predicted, on average
    spread: float  # a factor, up and down: the average distance from that

    def tokens(self, simulated: float) -> tuple[float, float]:
        """Return the least and the most that a simulated rate of tokens stands for."""
        return simulated / self.slower / self.spread, simulated / self.slower * self.spread


def band_of(lines: Sequence[Compared]) -> Band:
    """Return the error of the model at published points."""
    points = judged(lines)
    mean = bias(points)
    return Band(1 / mean, math.exp(sum(abs(math.log(line.ratio / mean)) for line in points) / len(points)))


def ladder(budgets: Budgets, gpus: Sequence[str], points: Sequence[Compared]) -> Iterator[str]:
    """Yield the goals, each with its figure on each GPU and, where it is missed, the reason."""
    band = band_of(points)
    yield (
        f"band: published times are {band.slower:.2f} times the simulated ones on average, and off that by a factor of "
        f"{band.spread:.2f};"
    )
    yield "the model errs alike in both steps of a ratio, so ratios have no band"
    yield from _own_points(gpus, points)
    yield ""
    yield f"{'GPU':<9} {'goal':<46} {'simulated':>9} {'band':>11}  verdict"
    for gpu in gpus:
        for line in _lines(budgets, gpu, band):
            yield f"{gpu:<9} {line}"


def _own_points(gpus: Sequence[str], points: Sequence[Compared]) -> Iterator[str]:
    """Yield the error at the points of each GPU alone; they may be few, and of kernels unlike ours."""
    for gpu in gpus:
        if own := [point for point in judged(points) if point.gpu == gpu]:
            band = band_of(own)
            count = f"{len(own)} point{'s' if len(own) > 1 else ''}"
            yield f"{gpu} alone, {count}: {band.slower:.2f} times, off that by a factor of {band.spread:.2f}"
        else:
            yield f"{gpu} alone: no point"


def _lines(budgets: Budgets, gpu: str, band: Band) -> Iterator[str]:
    plain = budgets.get((PLAIN.name, gpu))
    if plain:
        yield from _rate(plain, TOKENS_PER_S.get(gpu), band)
    for scene, most in STEPS.items():
        step = budgets.get((scene.name, gpu))
        goal = f"{scene.name}: at most {most:.1f} plain steps"
        if not plain or not step:
            yield _missing(goal)
            continue
        steps = step.step_ms / plain.step_ms
        yield _line(goal, f"{steps:.2f}", steps <= most)
        if steps > most:
            yield from _growth(plain, step)
    many = budgets.get((BATCH_16.name, gpu))
    goal = f"16 sequences: at least {BATCH:.0f} times the tokens of one"
    if plain and many:
        times = BATCH_16.sequences * plain.step_ms / many.step_ms
        yield _line(goal, f"{times:.1f}", times >= BATCH)
        if times < BATCH:
            yield from _growth(plain, many)
    else:
        yield _missing(goal)
    yield from _attention(budgets.get((DEEP.name, gpu)), band)


def _line(goal: str, figure: str, met: bool, band: str = "", note: str = "") -> str:
    return f"{goal:<46} {figure:>9} {band:>11}  {'met' if met else 'missed'}{note}"


def _missing(goal: str) -> str:
    return f"{goal:<46} {'not run':>9}"


def _rate(plain: Budget, goal: float | None, band: Band) -> Iterator[str]:
    rate = 1e3 / plain.step_ms
    low, high = band.tokens(rate)
    within = f"{low:.0f} to {high:.0f}"
    if goal is None:
        yield f"{'batch 1, 512 tokens deep: no goal, tokens/s':<46} {rate:9.0f} {within:>11}"
        return
    note = ", but not in all of the band" if low < goal <= rate else ""
    note = ", but the band has it" if rate < goal <= high else note
    yield _line(f"batch 1, 512 tokens deep: {goal:.0f} tokens/s", f"{rate:.0f}", rate >= goal, within, note)
    if rate < goal:
        yield from _reasons(plain, goal)


def _reasons(plain: Budget, goal: float) -> Iterator[str]:
    """Yield where the time goes that the goal does not have."""
    floor = plain.dram_gb / plain.gpu.stream_gbs * 1e3
    yield _reason(
        f"the goal is {1e3 / goal:.3f} ms: DRAM alone needs {floor:.3f}, kernels take {plain.kernels_ms:.3f}, the gaps "
        f"of {plain.nodes} nodes, {plain.early_nodes} with PDL, {plain.gaps_ms:.3f}"
    )
    yield _reason(_matmul_counts(plain))
    slow = sorted(_by_name(plain).items(), key=lambda item: -_waste(plain, item[1]))[:4]
    yield _reason("most above the time of their bytes: " + "; ".join(_describe(plain, *item) for item in slow))


def _growth(plain: Budget, step: Budget) -> Iterator[str]:
    """Yield the kernels that take longer than in the plain step."""
    before = {name: sum(row.times * row.us for row in rows) / 1e3 for name, rows in _by_name(plain).items()}
    more = {
        name: sum(row.times * row.us for row in rows) / 1e3 - before.get(name, 0.0)
        for name, rows in _by_name(step).items()
    }
    slow = sorted(more, key=lambda name: -more[name])[:4]
    named = _by_name(step)
    yield _reason(
        f"{step.step_ms:.3f} ms for {plain.step_ms:.3f}; most of it: "
        + "; ".join(f"+{more[name]:.3f} ms {_describe(step, name, named[name])}" for name in slow)
    )
    yield _reason(_matmul_counts(step))


def _attention(step: Budget | None, band: Band) -> Iterator[str]:
    goal = f"32k k8v4: attention at least {BANDWIDTH:.0%} of bandwidth"
    names = {name: rows for name, rows in _by_name(step).items() if name.startswith(ATTENTION)} if step else {}
    if step is None or not names:
        yield _missing(goal)
        return
    rows = [row for some in names.values() for row in some if row.estimate]
    num_bytes = sum(row.times * row.estimate.counts.dram_bytes for row in rows if row.estimate)
    share = num_bytes / sum(row.times * row.us for row in rows) / 1e3 / step.gpu.dram_gbs
    low, high = band.tokens(share)
    yield _line(goal, f"{share:.0%}", share >= BANDWIDTH, f"{low:.0%} to {high:.0%}")
    if share < BANDWIDTH:
        yield from (_reason(_describe(step, name, some)) for name, some in names.items())


def _matmul_counts(step: Budget) -> str:
    """Return the counts of a step's products with weights."""
    rows = [(row, row.estimate) for row in step.rows if row.estimate and weights_of(row)]
    weights = sum(row.times * weights_of(row) for row, _ in rows)
    instructions = sum(row.times * one.counts.warp_instructions * 32 for row, one in rows)
    us = sum(row.times * row.us for row, _ in rows)
    in_flight = sum(row.times * row.us * one.in_flight for row, one in rows) / us
    registers = sorted({one.counts.registers for _, one in rows})
    return (
        f"products: {instructions / weights:.1f} instructions a weight, {in_flight:.0f} bytes in flight of "
        f"{rows[0][1].needed:.0f} on average, {registers[0]} to {registers[-1]} registers"
    )


def _by_name(step: Budget) -> dict[str, list[Row]]:
    names: dict[str, list[Row]] = {}
    for row in step.rows:
        names.setdefault(row.name, []).append(row)
    return names


def _waste(step: Budget, rows: list[Row]) -> float:
    """Return the microseconds of kernels beyond those in which DRAM brings their bytes."""
    needed = sum(row.times * row.estimate.counts.dram_bytes for row in rows if row.estimate) / step.gpu.stream_gbs / 1e3
    return sum(row.times * row.us for row in rows) - needed


def _describe(step: Budget, name: str, rows: list[Row]) -> str:
    times, one = sum(row.times for row in rows), rows[0].estimate
    head = f"{times} x {name} {rows[0].us:.1f} us"
    if one is None:
        return head
    return (
        f"{head} ({one.bound}, {one.counts.dram_bytes / rows[0].us / 1e3 / step.gpu.dram_gbs:.0%} of bandwidth, "
        f"{one.in_flight:.0f} bytes in flight, {one.counts.registers} registers, {one.placement.waves:.2f} waves)"
    )


def _reason(text: str) -> str:
    return f"    {text}"
