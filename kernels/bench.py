"""`python -m edgelm.kernels.bench`: what each op costs on this GPU, in microseconds and as a part of what it can read.

Owns the program and the form of its results. An op is timed only after all its cases agree with their references. On
the CPU there is only `--tiny`: Triton's interpreter runs small cases, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch

from edgelm.kernels.target import Target, target_of

SEED = 20


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one case."""

    op: str
    shape: str
    rows: int
    format: str
    fault: str  # "": the kernel agrees with its reference
    deviation: float | None  # from the reference, in units of its largest value
    us: float | None = None  # of a call
    gbps: float | None = None  # what it must move, by the time it takes
    fraction: float | None = None  # of the read-only bandwidth
    rival_us: float | None = None  # of torch's bfloat16 matmul
    speedup: float | None = None  # how many times as long that takes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code: 1, where an op is wrong or nothing could be measured."""
    given = _parsed(arguments)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not given.tiny:
        _say("no GPU: nothing can be measured (--tiny runs small cases in Triton's interpreter, untimed)")
        return 1
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rows = 0
    with given.out.open("w") if given.out else Path(os.devnull).open("w") as out:
        bandwidth = _measured_bandwidth(device, given.tune)
        _write(out, {"target": target_of(device)._asdict(), "read_gbps": bandwidth, "unix_time": int(time.time())})
        _say(heading(target_of(device), bandwidth))
        red = False
        for row in _measured(device, given, bandwidth):
            rows, red = rows + 1, red or bool(row.fault)
            _write(out, asdict(row))
            _say(line(row))
    _say(f"{rows} cases, {'at least one is wrong' if red else 'all agree with their references'}")
    return int(red or rows == 0)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m edgelm.kernels.bench", description=(__doc__ or "").split(":\n")[0])
    parser.add_argument("--ops", nargs="+", metavar="OP", help="some ops, such as matmul attention; all without")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="some shapes, such as 4096x4096")
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="some formats, such as q4_k int8")
    parser.add_argument("--tiny", action="store_true", help="small cases, also without a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there too, a line of JSON each")
    parser.add_argument("--tune", type=Path, metavar="FOLDER", help="try all configurations, and keep the best there")
    return parser.parse_args(arguments)


def _measured_bandwidth(device: torch.device, tuned: Path | None) -> float | None:
    """Return how fast the GPU reads, with the probe tuned if anything is."""
    from edgelm.kernels.benchmark import bench_cases
    from edgelm.kernels.tuning import TABLE

    if device.type != "cuda":
        return None
    from edgelm.kernels.benchmark.timing import read_gbps

    if tuned is not None:
        tuned.mkdir(parents=True, exist_ok=True)  # fails here, not after everything has been measured
        TABLE.open(tuned, target_of(device))
        _tune(bench_cases(["bandwidth"], False)[0], device)
    return read_gbps(device)


def _measured(device: torch.device, given: argparse.Namespace, bandwidth: float | None) -> Iterator[Row]:
    """Yield a row for each case: first all cases of an op are checked, then, if all are right, each is timed."""
    from edgelm.kernels.benchmark import bench_cases
    from edgelm.kernels.benchmark.check import check

    wanted = [
        case
        for case in bench_cases(given.ops, given.tiny)
        if case.shape in (given.shapes or [case.shape]) and case.format in (given.formats or [case.format])
    ]
    for _, cases in groupby(wanted, key=lambda case: case.op):
        listed = list(cases)
        verdicts = [check(case, device, SEED) for case in listed]
        right = all(verdict.green for verdict in verdicts)
        for case, verdict in zip(listed, verdicts, strict=True):
            deviation = verdict.deviation if math.isfinite(verdict.deviation) else None
            row = Row(case.op, case.shape, case.rows, case.format, verdict.fault, deviation)
            if not right or device.type != "cuda":
                yield row
                continue
            if given.tune is not None:
                _tune(case, device)
            assert bandwidth is not None
            yield _timed(case, row, device, bandwidth)


def _timed(case: Any, row: Row, device: torch.device, bandwidth: float) -> Row:
    from edgelm.kernels.benchmark import made
    from edgelm.kernels.benchmark.timing import copies_of, time_us

    inputs = made(case.work, device, SEED)
    us = time_us(lambda each: case.work.run(each, "triton"), copies_of(inputs, device))
    gbps = case.moved_bytes(inputs) / us / 1e3
    row = replace(row, us=us, gbps=gbps, fraction=gbps / bandwidth)
    if case.rival is None:
        return row
    del inputs
    rival = case.rival
    rival_us = time_us(lambda each: rival.run(each, ""), copies_of(made(rival, device, SEED), device))
    return replace(row, rival_us=rival_us, speedup=rival_us / us)


def _tune(case: Any, device: torch.device) -> None:
    from edgelm.kernels.benchmark import made
    from edgelm.kernels.benchmark.timing import copies_of, time_us_or_inf
    from edgelm.kernels.tuning import TABLE

    copies = copies_of(made(case.work, device, SEED), device)

    def run(inputs: Any) -> Any:
        return case.work.run(inputs, "triton")

    TABLE.tune(lambda: run(copies[0]), lambda _: time_us_or_inf(run, copies))


NUMBERS = (("us", ".2f"), ("gbps", ".0f"), ("fraction", ".1%"), ("speedup", ".2f"), ("deviation", ".0e"))


def heading(target: Target, bandwidth: float | None) -> str:
    """Return what all rows have in common, and the names of the columns."""
    speed = "untimed" if bandwidth is None else f"reads {bandwidth:.0f} GB/s"
    software = f"driver {target.driver}, CUDA {target.cuda}, torch {target.torch}, triton {target.triton}"
    columns = f"{'op':<11}{'shape':<34}{'format':<9}{'rows':>6}" + "".join(f"{name:>10}" for name, _ in NUMBERS)
    return f"{target.gpu}, {target.num_sms} processors, {software}; {speed}\n{columns}"


def line(row: Row) -> str:
    """Return a row as text."""
    values = [(getattr(row, name), form) for name, form in NUMBERS]
    numbers = "".join(f"{'-' if value is None else format(value, form):>10}" for value, form in values)
    fault = f"  ! {row.fault}" if row.fault else ""
    return f"{row.op:<11}{row.shape:<34}{row.format:<9}{row.rows:>6}{numbers}{fault}"


def _write(out: IO[str], values: dict[str, Any]) -> None:
    out.write(json.dumps(values) + "\n")
    out.flush()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
