"""How llama.cpp's threads wait for each other, and how many there are, as other processes come and go.

Owns the decision, from the load by other processes and the times of steps. On a quiet machine threads that spin are up
to twice as fast as threads that sleep. Where others want the cores, they are 10 times as slow, and for small models one
thread is often faster than two (docs/results/threads-2026-11-22.txt). Both change from minute to minute, so nothing is
measured in advance, and nothing is kept.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from edgelm.llama_binding import BUILD, L, cpu_library
from edgelm.machine.cpu import OtherLoad
from edgelm.places import own_places

CHECK_S = 0.2  # between two looks at the load; the kernel counts in hundredths of seconds
SPIN_US = 2000  # longer than the host's work between two steps
# Cores that others use, beyond those that our threads leave free. Between the two, nothing changes.
BUSY_ABOVE, QUIET_BELOW = 0.4, 0.25
NUM_TRIED = 3  # steps with each number of threads
TRY_AGAIN = 20  # times the duration of the trial, after which there is another one


class Threads(Protocol):
    """The threads of a context."""

    can_sleep: bool  # whether their way of waiting can be changed

    def set(self, single: int, batch: int) -> None:
        """Set their number, for steps of one token and for others."""

    def spin(self, microseconds: int) -> None:
        """Let threads that wait spin for that time before they sleep."""


class NativeThreads:
    """The threads of a llama.cpp context."""

    def __init__(self, context: Any) -> None:
        self._context = context
        # Only edgelm-llama's libraries have this function (packaging/llama/threads.c), and not on macOS.
        library = ctypes.CDLL(str(cpu_library)) if BUILD.ready_made else None
        self._spin: Any = getattr(library, "edgelm_spin_us", None)
        self.can_sleep = self._spin is not None

    def set(self, single: int, batch: int) -> None:
        L.llama_set_n_threads(self._context, single, batch)

    def spin(self, microseconds: int) -> None:
        if self._spin:
            self._spin(microseconds)


class Pace:
    """Adapts the threads of a context between steps. `load` returns the cores that others use, None if unknown."""

    def __init__(
        self,
        threads: Threads,
        single: int,
        batch: int,
        load: OtherLoad | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._threads = threads
        self._single, self._batch = single, batch
        self._load = load or OtherLoad()
        self._now = now
        self._checked = now()
        self._busy = False
        self._times: dict[int, list[float]] = {}  # of the trial: seconds by number of threads
        self._try_again = 0.0
        policy = own_places().wait_policy
        self._fixed = bool(policy) or max(single, batch) == 1
        threads.spin(0 if policy == "sleep" else SPIN_US)

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Set the threads for a step, and time it."""
        if self._fixed:
            yield
            return
        start = self._now()
        if start - self._checked >= CHECK_S:
            self._check(start)
        yield
        if num_tokens == 1 and self._times:
            self._tried(self._now() - start)

    def _check(self, now: float) -> None:
        """Look at the load by others."""
        self._checked = now
        others = self._load.cores()
        if others is None:
            return
        beyond = others - max(0, self._load.num_cores - self._single)
        if self._busy and beyond < QUIET_BELOW:
            self._busy = False
            self._times = {}
            self._threads.spin(SPIN_US)
            self._threads.set(self._single, self._batch)
        elif not self._busy and beyond > BUSY_ABOVE:
            self._busy = True
            self._threads.spin(0)
            if self._threads.can_sleep:
                self._try_again = 0.0
            else:  # spinning threads must have cores of their own
                free = max(1, self._single - round(beyond))
                self._threads.set(free, free)
        if self._busy and self._threads.can_sleep and not self._times and now >= self._try_again:
            self._begin_trial()

    def _begin_trial(self) -> None:
        self._times = {count: [] for count in {1, self._single}}
        self._threads.set(self._single, self._batch)

    def _tried(self, seconds: float) -> None:
        """Take the time of a step of the trial; after the last, choose the number of threads."""
        count = next(count for count in (self._single, 1) if len(self._times[count]) < NUM_TRIED)
        self._times[count].append(seconds)
        if len(self._times[count]) < NUM_TRIED:
            return
        if count != 1:
            self._threads.set(1, self._batch)
            return
        best = min(self._times, key=lambda tried: statistics.median(self._times[tried]))
        self._threads.set(best, self._batch)
        self._try_again = self._now() + TRY_AGAIN * sum(map(sum, self._times.values()))
        self._times = {}
