"""Predicted and published times beside each other, and how far they are apart.

Owns what is added to a prediction for the way in which a figure was measured, the points that a constant was calibrated
on, and the table. A point that cannot be predicted is listed with the reason.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.kernels.performance.estimate import estimate
from tests.kernels.performance.gpus import Gpu
from tests.kernels.performance.published import Point
from tests.kernels.performance.published_builds import MissingPackageError
from tests.kernels.ptx.errors import EmulatorError

# us that the way of measuring adds: two events around an empty kernel (published: 4.544 us on an H100), a graph of one
# empty node that is launched again and again (stated by the source of those points)
ADDED = {"events": 4.5, "replay": 4.0, "profiler": 0.0}
# a constant of the model was chosen by these; they do not count in the errors
CALIBRATED = {
    **{
        (gpu, "stream of 8 bytes a thread, 2 x 32 threads"): "cycles until a CTA's place is taken by the next"
        for gpu in ("H200", "A100 40GB", "L40")
    },
    ("H100", "empty kernel"): "us added by two events",
    ("H200", "add fp32 884736000"): "GB/s of a stream on the H200",
    ("H200", "add fp16 2097152000"): "GB/s of a stream on the H200",
}


@dataclass(slots=True)
class Compared:
    """A published point with its prediction."""

    gpu: str
    name: str
    timing: str
    published: float  # us
    predicted: float = 0.0  # us
    bound: str = ""
    problem: str = ""

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def calibrated(self) -> bool:
        return (self.gpu, self.name) in CALIBRATED


def compare(point: Point, gpu: Gpu) -> Compared:
    """Predict a point: the fastest of the variants that its source tuned over."""
    result = Compared(point.gpu, point.name, point.timing, point.published_us)
    if point.clock_ghz is not None:
        gpu = gpu._replace(clock_ghz=point.clock_ghz)
    best = math.inf
    for build in (point.build, *point.others):
        try:
            estimates = [estimate(launch, gpu, flushed=point.timing == "events") for launch in build()]
        except (MissingPackageError, EmulatorError) as error:
            result.problem = str(error)[:160]
            continue
        gap = {"graph": gpu.graph_gap_us, "loop": gpu.stream_gap_us}.get(point.timing, 0.0)
        total = sum(one.us + gap for one in estimates) + ADDED.get(point.timing, 0.0)
        if total < best:
            best = total
            result.predicted = total
            result.bound = max(estimates, key=lambda one: one.us).bound
    if math.isfinite(best):
        result.problem = ""
    return result


def compare_all(points: Sequence[Point], gpus: dict[str, Gpu], kept: Path, seconds: float) -> None:
    """Predict points that the file does not have, a line each, until the time is over; those with variants last."""
    done = {(line.gpu, line.name) for line in read(kept)}
    end = time.monotonic() + seconds
    with kept.open("a") as file:
        for point in sorted(points, key=lambda point: len(point.others)):
            if time.monotonic() > end:
                break
            if (point.gpu, point.name) not in done:
                result = compare(point, gpus[point.gpu])
                file.write(json.dumps(asdict(result)) + "\n")
                file.flush()


def read(kept: Path) -> list[Compared]:
    """Return the predictions of a file."""
    if not kept.exists():
        return []
    return [Compared(**json.loads(line)) for line in kept.read_text().splitlines()]


def error(lines: Sequence[Compared]) -> float:
    """Return the geometric mean of how many times a prediction is off, up or down: 1 is exact."""
    return math.exp(sum(abs(math.log(line.ratio)) for line in lines) / len(lines))


def bias(lines: Sequence[Compared]) -> float:
    """Return the geometric mean of predicted over published."""
    return math.exp(sum(math.log(line.ratio) for line in lines) / len(lines))


def judged(lines: Sequence[Compared]) -> list[Compared]:
    """Return the predictions that say something of the model."""
    return [line for line in lines if not line.problem and not line.calibrated]


def table(lines: Sequence[Compared], missing: int) -> Iterator[str]:
    """Yield the table and its summary."""
    points = judged(lines)
    yield f"{'GPU':<15} {'kernel':<62} {'timing':<8} {'published us':>12} {'predicted us':>12} {'ratio':>6} bound"
    for line in lines:
        head = f"{line.gpu:<15} {line.name:<62} {line.timing:<8} {line.published:12.1f}"
        if line.problem:
            yield f"{head} {'-':>12} {'-':>6} not predicted: {line.problem}"
            continue
        mark = f"  calibrated on it: {CALIBRATED[line.gpu, line.name]}" if line.calibrated else ""
        yield f"{head} {line.predicted:12.1f} {line.ratio:6.2f} {line.bound}{mark}"
    yield ""
    yield f"{len(points)} points judged, {len(lines) - len(points)} not, {missing} not run in time"
    yield f"{'group':<42} {'points':>6} {'off by a factor':>15} {'predicted/published':>19}"
    for name, group in _groups(points):
        yield f"{name:<42} {len(group):6d} {error(group):15.2f} {bias(group):19.2f}"
    yield ""
    yield "worst:"
    for line in sorted(points, key=lambda line: -abs(math.log(line.ratio)))[:12]:
        yield f"  {line.ratio:6.2f}  {line.gpu}: {line.name}"


def _groups(lines: Sequence[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    yield "all", list(lines)
    for label, of in (("timing", lambda line: line.timing), ("GPU", lambda line: line.gpu), ("", family)):
        names = dict.fromkeys(of(line) for line in lines)
        for name in names:
            yield f"{label} {name}".strip(), [line for line in lines if of(line) == name]


def family(line: Compared) -> str:
    """Return the words of a point's name before its shape."""
    words = line.name.partition(",")[0].split()
    numbers = [at for at, word in enumerate(words) if word[0].isdigit() and at > 0]
    return " ".join(words[: numbers[0]] if numbers else words)
