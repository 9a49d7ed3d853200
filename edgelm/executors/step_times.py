"""How long decode steps of an executor take, by rows and cached positions: a short benchmark, and where it is kept.

Owns the choice of points, the measuring and the file. Works through the executor's protocol, on one that runs nothing
else. Knows nothing of what the times are used for.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from edgelm.core import Chunk, Copy, Drop, Executor, Load, Op, SamplingParams, Save, Sequence, Step, Trim
from edgelm.executors.kept import keep_json

Point = tuple[int, int, float]  # rows, depth, seconds

ROWS = (1, 4, 2, 8, 3, 16, 6, 5, 12, 7, 32)  # what tells most comes first: the time may end
DEEP_ROWS = (1, 4, 8, 2)
DEPTH = 2048  # positions; attention's share grows in proportion
STATE_LEN = 32  # positions of the state that is repeated to fill the cache
SHALLOW_LEN = 8
REPEATS = 3  # of a point in a start
STARTS = 3  # in which a point is measured
LARGEST_FILE_BYTES = 100_000
VERSION = 1


class StepTimes:
    """The measured points of one (model, engine, KV type, machine), kept in a file of `folder`.

    `identity` is everything that the times depend on; a file of another identity is another file. Each point is
    measured in several starts: in one of them the machine may have been busy.
    """

    def __init__(self, folder: Path, identity: Iterable[object]) -> None:
        key = hashlib.sha256(json.dumps([VERSION, *map(str, identity)]).encode()).hexdigest()[:32]
        self._path = folder / f"{key}.json"
        self.points: list[Point] = _read(self._path)

    def measure(self, executor: Executor, budget_s: float, more_s: float = 0.0) -> None:
        """Measure the points that were measured least, as far as the time allows, and keep them.

        Missing ones have `budget_s` seconds; where there is none, repeating others has `more_s`.
        """
        known = Counter((rows, depth) for rows, depth, _ in self.points)
        wanted = sorted((each for each in _wanted(executor) if known[each] < STARTS), key=lambda each: known[each])
        missing = bool(wanted) and not known[wanted[0]]
        budget_s = budget_s if missing else more_s
        if wanted and budget_s > 0:
            self.points += measure_steps(executor, wanted, budget_s)
            keep_json(self._path, self.points)

    def surface(self) -> list[Point]:
        """Return each point once, with the median of its times."""
        times: dict[tuple[int, int], list[float]] = {}
        for rows, depth, seconds in self.points:
            times.setdefault((rows, depth), []).append(seconds)
        return [(rows, depth, statistics.median(each)) for (rows, depth), each in times.items()]


def measure_steps(
    executor: Executor, wanted: list[tuple[int, int]], budget_s: float, now: Callable[[], float] = time.perf_counter
) -> list[Point]:
    """Return the median seconds of steps of `(rows, depth)` on an executor without sequences, which it leaves empty.

    Stops when `budget_s` is spent. Raises EngineError when the executor refuses a step.
    """
    end = now() + budget_s
    bench: _Bench = _Blocks(executor) if executor.info.block_len else _Slots(executor)
    points: list[Point] = []
    try:
        bench.fill(SHALLOW_LEN)
        bench.step(1)  # the first one touches memory that was never used
        for rows, depth in wanted:
            if now() > end:
                break
            bench.fill(depth)
            times = []
            for _ in range(REPEATS):
                began = now()
                bench.step(rows)
                times.append(now() - began)
                if now() > end:
                    break
            points.append((rows, bench.depth, statistics.median(times)))
    finally:
        bench.clear()
    return points


class _Bench(Protocol):
    """One sequence on an executor, at some depth. The time of a step does not depend on the values in the cache."""

    @property
    def depth(self) -> int:
        """Positions that a row reads."""

    def fill(self, depth: int) -> None:
        """Let the sequence hold about `depth` positions."""

    def step(self, rows: int) -> None:
        """Run one step that samples `rows` rows, and forget it."""

    def clear(self) -> None:
        """Leave the executor empty."""


class _Blocks:
    """On block tables nothing has to be filled: blocks that were never written can be read."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._seq = Sequence(-1, [0], 1, SamplingParams(temperature=0))
        self._token = executor.info.num_vocab // 2
        self.depth = 0

    def fill(self, depth: int) -> None:
        self.depth = depth

    def step(self, rows: int) -> None:
        table = tuple(range(-(-(self.depth + rows) // self._executor.info.block_len)))
        step = Step((Chunk(self._seq, self.depth, [self._token] * rows, rows, table),))
        self._executor.forward(step)
        self._executor.sample(step, None).read()

    def clear(self) -> None:
        self.depth = 0


class _Slots:
    """Slot 0, whose cache is filled by copies of one state."""

    _KEY = -1  # of the snapshot; the scheduler's count from 0

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._seq = Sequence(-1, [0], 1, SamplingParams(temperature=0))
        self._held = 0  # positions of slot 0; its cells may be more
        self._token = executor.info.num_vocab // 2
        self.depth = 0  # cells that a row reads

    def fill(self, depth: int) -> None:
        """Let slot 0 hold about `depth` cells."""
        if self.depth and (depth > SHALLOW_LEN) == (self.depth > SHALLOW_LEN):
            return
        self.clear()
        length = min(STATE_LEN, depth)
        self._run(length, rows=0)
        self._held = self.depth = length
        copies = (depth - length) // length
        if copies > 0:
            repeat: list[Op] = [Load(self._KEY, 1), Copy(1, 0, length), Trim(1, 0)]
            self._executor.forward(Step((), (Save(0, self._KEY), *(repeat * copies), Drop(self._KEY))))
            self.depth += copies * length

    def step(self, rows: int) -> None:
        """Run one step that samples `rows` rows, and forget it."""
        step = self._run(rows, rows)
        self._executor.sample(step, None).read()
        self._executor.forward(Step((), (Trim(0, self._held),)))

    def clear(self) -> None:
        if self.depth:
            self._executor.forward(Step((), (Trim(0, 0),)))
        self._held = self.depth = 0

    def _run(self, count: int, rows: int) -> Step:
        step = Step((Chunk(self._seq, self._held, [self._token] * count, rows, 0),))
        self._executor.forward(step)
        return step


def _wanted(executor: Executor) -> list[tuple[int, int]]:
    """Return the points for an executor: (rows, depth)."""
    info = executor.info
    most = min(info.max_rows, info.max_tokens, info.context - SHALLOW_LEN)
    shallow = [(rows, SHALLOW_LEN) for rows in ROWS if rows <= most]
    room = info.context if info.block_len else info.capacity  # on slots, positions repeat
    depth = min(DEPTH, (room - max(DEEP_ROWS) - STATE_LEN) // STATE_LEN * STATE_LEN)
    short = depth < 4 * STATE_LEN or info.context < STATE_LEN + max(DEEP_ROWS)
    if short or info.max_sequences < 2 or not (info.can_trim and info.can_copy):
        return shallow
    return shallow[:5] + [(rows, depth) for rows in DEEP_ROWS if rows <= most] + shallow[5:]


def _read(path: Path) -> list[Point]:
    """Return the points of a file; none where there is no file, or not one that we wrote."""
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            return []
        said: Any = json.loads(path.read_text(encoding="utf-8"))
        points = [(int(rows), int(depth), float(seconds)) for rows, depth, seconds in said]
    except (OSError, ValueError, TypeError, RecursionError, OverflowError):
        return []
    fine = all(0 < rows < 10_000 and 0 <= depth < 10**8 and 0 < s < 1e4 for rows, depth, s in points)
    return points if fine and not any(math.isnan(s) for _, _, s in points) else []
