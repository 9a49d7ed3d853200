"""Tuning while a model is loaded: its own kernels, on its own weights, for some seconds.

The step that a model runs is noted, op by op. A kernel is then launched over the different layers whose weights have
its shape and format, so that none of them is in the cache, once with each of a few configurations.

    compile    the candidates of all kernels, in several processes
    measure    1 and 8 rows, in CUDA graphs; a candidate whose results are not the default's is never taken
    confirm    those that are faster, with as many rows as a step may verify: right, and not slower

All numbers of rows share a configuration, since a row's sums must be made in one order. 1 row is an answer alone;
8 rows are a verified draft or several answers, and the same compiled kernel. Both count the same: by the ratio to the
default's time, since a share of a step saved is a share of its time in either case.

Owns the choice of the work, its order and its limit. Knows nothing of how a configuration is used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from edgelm.backends.reports import Reports
from edgelm.backends.torch.check_bounds import Bound, bounds_of
from edgelm.backends.torch.compilation import Compilation, recording
from edgelm.backends.torch.compiling import compile_kernels
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.timing import COLD_FACTOR, time_us
from edgelm.backends.torch.trial import nan_filled
from edgelm.backends.torch.tuning import (
    LEAST_GAIN,
    MAX_UNFINISHED,
    Times,
    begin,
    measure,
    settle,
    times_begun,
    withdraw,
    write,
)
from edgelm.base.errors import DeviceError, ModelError, OutOfMemoryError
from edgelm.kernels.choice import Implementation, observed_by
from edgelm.kernels.gpu_target import target_of
from edgelm.kernels.tuning import Config, Table

log = logging.getLogger(__name__)

LIMIT_S = 20.0  # for everything; kernels that are left are tuned at the next start
COMPILE_S = 12.0  # of these, for compiling in several processes
NUM_CANDIDATES = 8
ROWS = 1, 8
MIN_US = 5_000  # of the replays of one measurement
MAX_COMPARED = 2  # calls of one kernel whose results are compared

Key = tuple[str, str]  # of the table: the op that it is kept for, and its shape
Step = Callable[[int], object]  # runs a step of the model with so many rows


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op in a step; it can be repeated."""

    op: str
    args: tuple[object, ...]  # those by which its implementation was chosen
    run: Callable[[], object]

    @property
    def nbytes(self) -> int:
        return sum(getattr(arg, "nbytes", 0) for arg in self.args)


@dataclass(slots=True)
class Launched:
    """The calls of one kernel in a step: so many as the cache cannot hold, and the bytes that all of them read."""

    candidates: list[Config]
    calls: list[Call] = field(default_factory=list)
    nbytes: int = 0


def tune_model(table: Table, step: Step, most_rows: int, device: torch.device, reports: Reports) -> None:
    """Tune the kernels of a model that are not tuned on this GPU yet, and keep the results in the table's file.

    Kernels that a model of this process uses already keep their configuration. Too little memory ends it. Raises
    ModelError if loading is cancelled, DeviceError where the GPU fails.
    """
    in_use = table.in_use
    with gpu_errors(), torch.inference_mode():
        with recording() as needed:
            steps = [launched_by(table, partial(step, rows), 0) for rows in (*ROWS, most_rows)]
        found = {key: steps[0][key] for key in steps[0] if all(key in others for others in steps)}
        keys = [key for key in found if key not in in_use and not table.is_measured(*key, found[key].candidates)]
        for key in [key for key in keys if times_begun(table, *key) >= MAX_UNFINISHED]:
            log.warning("%s is not tuned: that has ended the process %d times", " ".join(key), MAX_UNFINISHED)
            settle(table, *key, found[key].candidates[0])
            write(table)
            keys.remove(key)
        if not keys:
            return
        compile_kernels(needed, lambda done, total: reports.say(f"compiling the GPU's kernels: {done} of {total}"))
        keys.sort(key=lambda key: -found[key].nbytes)  # what a step spends most time with comes first
        try:
            _Tuner(table, step, most_rows, device, reports).tune(keys)
        except OutOfMemoryError as error:
            log.info("kernels are not tuned: %s", error.message)
        torch.cuda.empty_cache()  # before graphs are captured


def launched_by(table: Table, run: Callable[[], object], cold_bytes: int) -> dict[Key, Launched]:
    """Return the calls that `run` makes of kernels in the table. Of each kernel, calls are kept up to `cold_bytes`."""
    found: dict[Key, Launched] = {}
    nested = False

    def observe(op: str, kernel: Implementation, _: Implementation, args: tuple[object, ...]) -> Implementation:
        def note(*given: object, **named: object) -> object:
            nonlocal nested
            nested = True
            try:
                with table.recording() as launched:
                    result = kernel.run(*given, **named)
            finally:
                nested = False
            call = Call(op, args, partial(kernel.run, *given, **named))
            for key, candidates in launched.items():
                entry = found.setdefault(key, Launched(list(candidates)))
                if entry.nbytes < cold_bytes:
                    entry.calls.append(call)
                entry.nbytes += call.nbytes
            return result

        return kernel if nested else kernel._replace(run=note)

    with observed_by(observe):
        run()
    return found


def agrees(got: Tensor, want: Tensor, bound: Bound | None) -> bool:
    """Return whether each number of a result is within the bound of its difference; without bounds, equal."""
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    if bound is not None:
        same |= (got.float() - want.float()).abs() <= bound.most
    return bool(same.all().cpu())


class _Tuner:
    """The tuning of one model. `calls` are those of its steps, by the number of rows."""

    def __init__(self, table: Table, step: Step, most_rows: int, device: torch.device, reports: Reports) -> None:
        self._table, self._step, self._most_rows, self._reports = table, step, most_rows, reports
        self._cold_bytes = max(COLD_FACTOR * target_of(device).l2_bytes, 1)
        self._calls: dict[int, dict[Key, Launched]] = {}
        self._start_s = time.monotonic()
        self._begun: set[Key] = set()

    def tune(self, keys: list[Key]) -> None:
        """Do all the work. A failure of the GPU leaves the notes in the file of those kernels that are not settled."""
        try:
            with gpu_errors():
                self._tune(keys)
        except DeviceError:
            self._begun.clear()
            raise
        finally:
            for key in self._begun:
                withdraw(self._table, *key)
            write(self._table)

    def _tune(self, keys: list[Key]) -> None:
        for rows in ROWS:
            self._calls[rows] = launched_by(self._table, partial(self._step, rows), self._cold_bytes)
        self._compile(keys)
        faster: dict[Key, Config] = {}
        for number, key in enumerate(keys):
            self._go_on()
            if self._is_late(LIMIT_S):
                log.info("%d of %d kernels are left to be tuned at the next start", len(keys) - number, len(keys))
                break
            self._reports.say(f"tuning the GPU's kernels: {number + 1} of {len(keys)}")
            self._measure(key, faster)
        self._confirm(faster)

    # -- compiling -----------------------------------------------------------------------------------------------------

    def _compile(self, keys: list[Key]) -> None:
        """Compile the candidates of these kernels, as far as the time allows."""
        needed: dict[tuple[str, str], Compilation] = {}
        for key in keys:
            for candidate in self._candidates(key):
                for compilation in self._missing(key, ROWS, candidate):
                    needed.setdefault((compilation.name, compilation.key), compilation)
            self._go_on()
        self._compile_some(list(needed.values()), COMPILE_S)

    def _compile_some(self, needed: list[Compilation], limit_s: float) -> None:
        def watch(done: int, total: int) -> None:
            self._go_on()
            if self._is_late(limit_s):
                raise _LateError
            self._reports.say(f"compiling kernels to choose from: {done} of {total}")

        try:
            compile_kernels(needed, watch, must=False)
        except _LateError:
            log.info("not all candidates of the GPU's kernels were compiled within %.0f s", limit_s)

    def _missing(self, key: Key, rows: Iterable[int], config: Config) -> list[Compilation]:
        """Return the kernels that this process lacks for a configuration."""
        default = self._candidates(key)[0]
        self._table.set(*key, config)
        try:
            with recording() as missing:
                for count in rows:
                    for call in self._calls[count][key].calls:
                        call.run()
        finally:
            self._table.set(*key, default)
        return missing

    def _is_compiled(self, key: Key, rows: Iterable[int], config: Config) -> bool:
        """Return whether a configuration can be launched; compile what other processes have left."""
        for compilation in self._missing(key, rows, config):
            if compilation.is_done:
                continue
            if self._is_late(LIMIT_S):
                return False
            try:
                with gpu_errors():
                    compilation.run()  # touches no GPU
            except DeviceError as error:
                log.warning("%s", error.message)
                return False
            self._reports.alive()
        return True

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _measure(self, key: Key, faster: dict[Key, Config]) -> None:
        """Measure a kernel, and keep the default if that is the fastest; put another one into `faster`."""
        candidates = self._candidates(key)
        compiled = [config for config in candidates if self._is_compiled(key, ROWS, config)]
        if self._is_late(LIMIT_S) and len(compiled) < len(candidates):
            return
        self._begin(key)
        fastest = measure(self._table, *key, compiled, self._times(key, ROWS))
        if fastest in (None, candidates[0]):
            self._settle(key, candidates[0])
        elif fastest is not None:
            faster[key] = fastest

    def _confirm(self, faster: dict[Key, Config]) -> None:
        """Take those configurations that are right and not slower with the most rows, and keep the others' default."""
        if not faster:
            return
        rows = self._most_rows
        found = launched_by(self._table, partial(self._step, rows), self._cold_bytes)
        self._calls[rows] = {key: found[key] for key in faster}
        del found
        needed = [one for key, config in faster.items() for one in self._missing(key, (rows,), config)]
        self._compile_some(needed, math.inf)
        for key, config in faster.items():
            default = self._candidates(key)[0]
            self._go_on()
            right = self._is_compiled(key, (rows,), config)
            if right:
                times = self._times(key, (rows,))
                (first_us,), (own_us,), (again_us,) = (
                    self._with(key, one, times) for one in (default, config, default)
                )
                right = own_us <= max(first_us, again_us) * (1 + LEAST_GAIN)
            self._settle(key, config if right else default)

    def _begin(self, key: Key) -> None:
        self._begun.add(key)
        begin(self._table, *key)

    def _settle(self, key: Key, config: Config) -> None:
        self._begun.discard(key)
        settle(self._table, *key, config)

    def _with(self, key: Key, config: Config, times_us: Callable[[], Times]) -> Times:
        self._table.set(*key, config)
        try:
            return times_us()
        finally:
            self._table.set(*key, self._candidates(key)[0])

    def _times(self, key: Key, rows: tuple[int, ...]) -> Callable[[], Times]:
        """Return a function that measures the configuration in the table; now the table has the default."""
        calls = [self._calls[count][key].calls for count in rows]
        compared = [call for some in calls for call in some[:MAX_COMPARED]]
        expected: list[tuple[list[Tensor], list[Bound | None]]] = []
        for call in compared:
            results = _results_of(call)
            expected.append((results, bounds_of(call.op, call.args, (), results) or [None] * len(results)))

        def times_us() -> Times:
            self._go_on()
            try:
                for call, wanted in zip(compared, expected, strict=True):
                    if not all(map(agrees, _results_of(call), *wanted)):
                        log.warning("a configuration of %s computes wrongly, and is not used", " ".join(key))
                        return (math.inf,) * len(rows)
                return tuple(time_us(_repeat, some, MIN_US) for some in calls)
            except OutOfResources:
                return (math.inf,) * len(rows)

        return times_us

    def _candidates(self, key: Key) -> list[Config]:
        return self._calls[ROWS[0]][key].candidates[:NUM_CANDIDATES]

    def _is_late(self, limit_s: float) -> bool:
        return time.monotonic() - self._start_s > limit_s

    def _go_on(self) -> None:
        if not self._reports.loaded(1.0):
            raise ModelError("loading the model was cancelled")


class _LateError(Exception):
    """The time for compiling is over."""


def _repeat(call: Call) -> object:
    return call.run()


def _results_of(call: Call) -> list[Tensor]:
    """Run a call; what it does not write is NaN."""
    with nan_filled():
        results = call.run()
    results = results if isinstance(results, tuple) else (results,)
    assert all(isinstance(result, Tensor) for result in results)
    return list(results)
