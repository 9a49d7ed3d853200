"""`python -m tests.kernels.bench`: the time of each op on this GPU, and its fraction of the memory bandwidth.

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

from edgelm.kernels.gpu_target import Target, target_of
from tests.kernels import benchmark
from tests.kernels.benchmark import BenchCase, make_inputs

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
    us: float | None = None  # time of a call
    gbps: float | None = None  # bytes that it must move, divided by its time
    fraction: float | None = None  # of the read-only bandwidth
    rival_us: float | None = None  # time of torch's bfloat16 matmul
    speedup: float | None = None  # rival_us / us


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code: 1 if an op is wrong or nothing could be measured."""
    options = _parse(arguments)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.tiny:
        _print("no GPU: nothing can be measured (--tiny runs small cases in Triton's interpreter, untimed)")
        return 1
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rows = 0
    with options.out.open("w") if options.out else Path(os.devnull).open("w") as out:
        bandwidth = _measure_bandwidth(device, options.tune)
        _write(out, {"target": target_of(device)._asdict(), "read_gbps": bandwidth, "unix_time": int(time.time())})
        _print(heading(target_of(device), bandwidth))
        red = False
        for row in _measure(device, options, bandwidth):
            rows, red = rows + 1, red or bool(row.fault)
            _write(out, asdict(row))
            _print(line(row))
    _print(f"{rows} cases, {'at least one is wrong' if red else 'all agree with their references'}")
    return int(red or rows == 0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.bench", description=(__doc__ or "").split(":\n")[0])
    parser.add_argument("--ops", nargs="+", metavar="OP", help="only these ops, such as matmul attention")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="only these shapes, such as 4096x4096")
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="only these formats, such as q4_k int8")
    parser.add_argument("--tiny", action="store_true", help="small cases, also without a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results to this file, as JSON lines")
    parser.add_argument("--tune", type=Path, metavar="FOLDER", help="try all configurations, and keep the best here")
    return parser.parse_args(arguments)


def _measure_bandwidth(device: torch.device, tuned: Path | None) -> float | None:
    """Return how fast the GPU reads, in gigabytes a second; with --tune, tune the probe first."""
    if device.type != "cuda":
        return None
    from edgelm.kernels.tuning import TABLE
    from tests.kernels.benchmark.timing import read_gbps

    if tuned is not None:
        tuned.mkdir(parents=True, exist_ok=True)  # fails here, not after everything has been measured
        TABLE.open(tuned, target_of(device))
        _tune(benchmark.bench_cases(["bandwidth"], False)[0], device)
    return read_gbps(device)


def _measure(device: torch.device, options: argparse.Namespace, bandwidth: float | None) -> Iterator[Row]:
    """Yield a row for each case: check all cases of an op, then time them if all are right."""
    chosen = [
        case
        for case in benchmark.bench_cases(options.ops, options.tiny)
        if case.shape in (options.shapes or [case.shape]) and case.format in (options.formats or [case.format])
    ]
    for _, group in groupby(chosen, key=lambda case: case.op):
        cases = list(group)
        verdicts = [benchmark.check(case, device, SEED) for case in cases]
        right = all(verdict.green for verdict in verdicts)
        for case, verdict in zip(cases, verdicts, strict=True):
            deviation = verdict.deviation if math.isfinite(verdict.deviation) else None
            row = Row(case.op, case.shape, case.rows, case.format, verdict.fault, deviation)
            if not right or device.type != "cuda":
                yield row
                continue
            if options.tune is not None:
                _tune(case, device)
            assert bandwidth is not None
            yield _time(case, row, device, bandwidth)


def _time(case: BenchCase, row: Row, device: torch.device, bandwidth: float) -> Row:
    from edgelm.backends.torch.timing import time_us
    from tests.kernels.benchmark.timing import copies_of

    inputs = make_inputs(case.work, device, SEED)
    us = time_us(lambda copy: case.work.run(copy, "triton"), copies_of(inputs, device))
    gbps = case.moved_bytes(inputs) / us / 1e3
    row = replace(row, us=us, gbps=gbps, fraction=gbps / bandwidth)
    if case.rival is None:
        return row
    del inputs
    rival = case.rival
    rival_us = time_us(lambda copy: rival.run(copy, ""), copies_of(make_inputs(rival, device, SEED), device))
    return replace(row, rival_us=rival_us, speedup=rival_us / us)


def _tune(case: BenchCase, device: torch.device) -> None:
    from triton.runtime.errors import OutOfResources

    from edgelm.backends.torch.timing import time_us
    from edgelm.backends.torch.tuning import tune
    from edgelm.kernels.tuning import TABLE
    from tests.kernels.benchmark.timing import copies_of

    copies = copies_of(make_inputs(case.work, device, SEED), device)

    def run(inputs: Any) -> Any:
        return case.work.run(inputs, "triton")

    def us_or_inf(_: object) -> float:
        try:
            return time_us(run, copies)
        except OutOfResources:
            return math.inf

    tune(TABLE, lambda: run(copies[0]), us_or_inf)


COLUMNS = (("us", ".2f"), ("gbps", ".0f"), ("fraction", ".1%"), ("speedup", ".2f"), ("deviation", ".0e"))


def heading(target: Target, bandwidth: float | None) -> str:
    """Return the GPU and its software in a line, and the names of the columns in the next."""
    speed = "untimed" if bandwidth is None else f"reads {bandwidth:.0f} GB/s"
    software = f"driver {target.driver}, CUDA {target.cuda}, torch {target.torch}, triton {target.triton}"
    columns = f"{'op':<11}{'shape':<34}{'format':<9}{'rows':>6}" + "".join(f"{name:>10}" for name, _ in COLUMNS)
    return f"{target.gpu}, {target.num_sms} processors, {software}; {speed}\n{columns}"


def line(row: Row) -> str:
    """Return a row as text."""
    values = [(getattr(row, name), form) for name, form in COLUMNS]
    numbers = "".join(f"{'-' if value is None else format(value, form):>10}" for value, form in values)
    fault = f"  ! {row.fault}" if row.fault else ""
    return f"{row.op:<11}{row.shape:<34}{row.format:<9}{row.rows:>6}{numbers}{fault}"


def _write(out: IO[str], values: dict[str, Any]) -> None:
    out.write(json.dumps(values) + "\n")
    out.flush()


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
