"""StepTimes: a short benchmark of an executor's decode steps by rows and cached positions, and its file.

Owns the choice of points, the measurement and the file. Works through the executor's protocol, while the executor runs
nothing else. Knows nothing of how the times are used.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.errors import SnapshotError
from edgelm.base.sampling import SamplingParams
from edgelm.engine.core import Chunk, Copy, Drop, Executor, ExecutorInfo, Load, Op, Save, Sequence, Step, Trim

Point = tuple[int, int, float]  # rows, depth, seconds

ROWS = (1, 4, 2, 8, 3, 16, 6, 5, 12, 7, 32)  # the most useful points first: the time budget may end
MORE_ROWS = (64,)  # more rows than one draft may have: only several sequences together reach them
DEEP_ROWS = (1, 4, 8, 2)
DEPTH = 2048  # positions; attention's share of a step grows in proportion
STATE_LEN = 32  # positions of the state that is repeated to fill the cache
SHALLOW_LEN = 8
NUM_REPEATS = 3  # of a point in one start of a process; the least counts, as other programs only add to it
NUM_STARTS = 3  # in which a point is measured
MAX_FILE_BYTES = 100_000
VERSION = 1  # of the measurement: part of the file's name


class StepTimes:
    """The measured points of one (model, engine, KV mode, machine), kept in a file of `folder`.

    `identity` is everything that the times depend on; another identity has another file. Each point is measured in
    several starts, because the machine may have been busy in one of them.
    """

    def __init__(self, folder: Path, identity: Iterable[object]) -> None:
        key = hashlib.sha256(json.dumps([VERSION, *map(str, identity)]).encode()).hexdigest()[:32]
        self._path = folder / f"{key}.json"
        self.points: list[Point] = _read(self._path)

    def measure(self, executor: Executor, budget_s: float, more_s: float = 0.0) -> None:
        """Measure the points with the fewest measurements, as far as the time allows, and keep them.

        Unmeasured points get `budget_s` seconds. If there is none, repetitions get `more_s` seconds.
        """
        counts = Counter((rows, depth) for rows, depth, _ in self.points)
        targets = [point for point in _all_points(executor) if counts[point] < NUM_STARTS]
        targets.sort(key=lambda point: counts[point])
        if targets and counts[targets[0]]:
            budget_s = more_s
        if targets and budget_s > 0:
            self.points += measure_steps(executor, targets, budget_s)
            atomic_json(self._path, self.points)

    def surface(self) -> list[Point]:
        """Return each point once, with the median of its times."""
        times: dict[tuple[int, int], list[float]] = {}
        for rows, depth, seconds in self.points:
            times.setdefault((rows, depth), []).append(seconds)
        return [(rows, depth, statistics.median(samples)) for (rows, depth), samples in times.items()]


def measure_steps(executor: Executor, points: list[tuple[int, int]], budget_s: float) -> list[Point]:
    """Return the least seconds of steps with `(rows, depth)`. The executor has no sequences, before and after.

    Each point is measured once before any is repeated: what is busy for a moment then slows few steps of a point.
    Stops when `budget_s` is spent. Raises EngineError if the executor refuses a step.
    """
    end = time.perf_counter() + budget_s
    bench: _Bench = _Blocks(executor) if executor.info.block_len else _Slots(executor)
    times: dict[tuple[int, int], float] = {}
    try:
        bench.fill(SHALLOW_LEN)
        bench.step(1)  # warm-up: the first step touches memory that was never used
        for rows, depth in points * NUM_REPEATS:
            if time.perf_counter() > end:
                break
            try:
                bench.fill(depth)
            except SnapshotError:  # there is no memory for a state, by a setting or just now
                continue
            began = time.perf_counter()
            bench.step(rows)
            took, point = time.perf_counter() - began, (rows, bench.depth)
            times[point] = min(took, times.get(point, took))
    finally:
        bench.clear()
    return [(rows, depth, seconds) for (rows, depth), seconds in times.items()]


class _Bench(Protocol):
    """One sequence on an executor, at some depth. The time of a step does not depend on the values in the cache."""

    @property
    def depth(self) -> int:
        """The positions that a row reads."""

    def fill(self, depth: int) -> None:
        """Extend the sequence to about `depth` positions. Raises SnapshotError where no state can be copied."""

    def step(self, rows: int) -> None:
        """Run one step that samples `rows` rows, then remove its rows from the cache."""

    def clear(self) -> None:
        """Remove the sequence from the executor."""


class _Blocks:
    """Sequences with block tables. Nothing has to be filled, because unwritten blocks can be read.

    It is one sequence, unless its rows are more than a step verifies of one: then others have the rest.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._token = executor.info.num_vocab // 2
        self.depth = 0

    def fill(self, depth: int) -> None:
        self.depth = depth

    def step(self, rows: int) -> None:
        most = _rows_of_sequence(self._executor.info)
        counts = [min(rows - first, most) for first in range(0, rows, most)]
        start = self.depth // len(counts)
        blocks = -(-(start + counts[0]) // self._executor.info.block_len)
        step = Step(tuple(self._chunk(i, start, count, blocks) for i, count in enumerate(counts)))
        self._executor.forward(step)
        self._executor.sample(step, None).read()

    def clear(self) -> None:
        self.depth = 0

    def _chunk(self, number: int, start: int, count: int, blocks: int) -> Chunk:
        seq = Sequence(-1 - number, [0], 1, SamplingParams(temperature=0))
        table = tuple(range(number * blocks, (number + 1) * blocks))
        return Chunk(seq, start, [self._token] * count, count, table)


class _Slots:
    """A sequence in slot 0, whose cache is filled with copies of one state."""

    _KEY = -1  # of the snapshot; the scheduler's keys count from 0

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._can_trim = executor.info.can_trim
        self._seq = Sequence(-1, [0], 1, SamplingParams(temperature=0))
        self._seq_len = 0  # positions of slot 0; it may have more cells
        self._token = executor.info.num_vocab // 2
        self.depth = 0  # cells that a row reads

    def fill(self, depth: int) -> None:
        """Fill slot 0 with about `depth` cells, and wait until a device has done it."""
        if not self._can_trim:  # the sequence grows by the rows that are measured
            self._restart()
            self.step(1)
            return
        if self.depth and (depth > SHALLOW_LEN) == (self.depth > SHALLOW_LEN):
            return
        self.clear()
        length = min(STATE_LEN, depth)
        self._run(length, rows=0)
        self._seq_len = self.depth = length
        copies = (depth - length) // length
        if copies > 0:
            repeat: list[Op] = [Load(self._KEY, 1), Copy(1, 0, length), Trim(1, 0)]
            try:
                self._executor.forward(Step((), (Save(0, self._KEY), *(repeat * copies), Drop(self._KEY))))
            except SnapshotError:
                self.clear()
                raise
            self.depth += copies * length
        self.step(1)

    def step(self, rows: int) -> None:
        if not self._can_trim and self._seq_len + rows > self._executor.info.context:
            self._restart()
        step = self._run(rows, rows)
        self._executor.sample(step, None).read()
        if self._can_trim:
            self._executor.forward(Step((), (Trim(0, self._seq_len),)))
        else:
            self._seq_len += rows

    def _restart(self) -> None:
        self.clear()
        self._run(SHALLOW_LEN, rows=0)
        self._seq_len = self.depth = SHALLOW_LEN

    def clear(self) -> None:
        if self.depth:
            self._executor.forward(Step((), (Trim(0, 0),)))
        self._seq_len = self.depth = 0

    def _run(self, count: int, rows: int) -> Step:
        step = Step((Chunk(self._seq, self._seq_len, [self._token] * count, rows, 0),))
        self._executor.forward(step)
        return step


def _all_points(executor: Executor) -> list[tuple[int, int]]:
    """Return the points to measure on an executor: (rows, depth)."""
    info = executor.info
    max_rows = min(info.max_rows, info.max_tokens, info.context - SHALLOW_LEN)
    max_rows = min(max_rows, info.max_sequences * _rows_of_sequence(info))
    numbers = (*ROWS, *MORE_ROWS) if info.max_draft else ROWS
    shallow = [(rows, SHALLOW_LEN) for rows in numbers if rows <= max_rows]
    room = info.context if info.block_len else info.capacity  # a slot's copies repeat the same positions
    depth = min(DEPTH, (room - max(DEEP_ROWS) - STATE_LEN) // STATE_LEN * STATE_LEN)
    too_short = depth < 4 * STATE_LEN or info.context < STATE_LEN + max(DEEP_ROWS)
    if too_short or info.max_sequences < 2 or not (info.can_trim and info.can_copy):
        return shallow
    return shallow[:5] + [(rows, depth) for rows in DEEP_ROWS if rows <= max_rows] + shallow[5:]


def _rows_of_sequence(info: ExecutorInfo) -> int:
    """Return the most rows that a step verifies of one sequence."""
    return info.max_draft + 1 if info.max_draft else info.max_rows


def _read(path: Path) -> list[Point]:
    """Return the points in a file; none if there is no file, or not one that we wrote."""
    try:
        points = [(int(rows), int(depth), float(seconds)) for rows, depth, seconds in read_json(path, MAX_FILE_BYTES)]
    except (ValueError, TypeError, OverflowError):
        return []
    valid = all(0 < rows < 10_000 and 0 <= depth < 10**8 and 0 < seconds < 1e4 for rows, depth, seconds in points)
    return points if valid else []
