"""How llama.cpp's threads wait for each other, and how many there are, as other processes come and go.

Owns the decision, from the load by other processes and the times of decode steps. On a quiet machine threads that spin
are up to three times as fast as threads that sleep. Where others want the cores, they are 10 times as slow, and for
small models one thread is often faster than two (docs/results/threads-2026-11-22.txt). Both change from minute to
minute, so nothing is measured in advance, and nothing is kept.
"""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from edgelm.backends.llama.binding import L, cpu_library
from edgelm.base.machine.cpu import OtherLoad
from edgelm.base.places import own_places

CHECK_S = 0.2  # between two looks at the load; the kernel counts in hundredths of seconds
PAUSE_S = 1.0  # between two steps, in which nobody asked
SPIN_US = 2000  # longer than the host's work between two steps
# Cores that others use, beyond those that our threads leave free. Between the two, nothing changes.
BUSY_ABOVE, QUIET_BELOW = 0.4, 0.25
SLEEPING = 0.56  # what threads that sleep make of their share of the cores in prompts: they wait for each other
DECODE_TOKENS = 16  # of a step; one with more has a prompt
STREAK = 8  # steps of one length before a trial: short runs are measured by others (engine/step_times.py)
TRIAL_ROUNDS = 2
TRIAL_STEPS = 3  # with each setting in a round; the first one wakes threads and does not count
HOPELESS = 1.3  # times the best: such a setting is out after its first step
FRESH_STEPS = 32  # whose mean is the present time of the setting in use
CLEARLY = 1.05  # times as fast as the setting in use: only then is another one better
TRY_AGAIN = 40  # times the duration of a trial, after which there is another one
TRY_AGAIN_S = 5.0  # at least


class Setting(NamedTuple):
    """A number of threads, and whether those that wait spin."""

    threads: int
    spin: bool


class Threads(Protocol):
    """The threads of a context."""

    can_sleep: bool  # whether their way of waiting can be changed

    def set(self, single: int, batch: int) -> None:
        """Set their number, for steps of one token and for others."""

    def spin(self, microseconds: int) -> None:
        """Let threads that wait spin for that time before they sleep; 0: let them sleep."""


class NativeThreads:
    """The threads of a llama.cpp context."""

    def __init__(self, context: Any) -> None:
        self._context = context
        # A build with a library for each variant (GGML_BACKEND_DL) has none of this name.
        library: Any = ctypes.CDLL(str(cpu_library)) if cpu_library.exists() else None
        # edgelm-llama's libraries have this function on Linux (packaging/llama/threads.c).
        self._spin: Any = getattr(library, "edgelm_spin_us", None)
        # LLVM's OpenMP has the first of these functions, too, but counts no threads.
        is_libgomp = hasattr(library, "GOMP_parallel") and not hasattr(library, "__kmpc_fork_call")
        self._idle_team = _IdleTeam(library.GOMP_parallel) if is_libgomp and not self._spin else None
        self.can_sleep = bool(self._spin or self._idle_team)

    def set(self, single: int, batch: int) -> None:
        L.llama_set_n_threads(self._context, single, batch)

    def spin(self, microseconds: int) -> None:
        if self._spin:
            self._spin(microseconds)
        elif self._idle_team:
            (self._idle_team.end if microseconds else self._idle_team.start)()

    def close(self) -> None:
        """End the threads that this object has started."""
        if self._idle_team:
            self._idle_team.end()


class _IdleTeam:
    """A second team of libgomp that does nothing: while it exists, the threads of every team sleep.

    libgomp reads its policy once, while it is loaded, and lets threads spin for some milliseconds before they sleep.
    But where it manages more threads than there are cores, they spin for a microsecond only
    (`gomp_throttled_spin_count_var` in its wait.h). A team ends with the thread that began it.
    """

    def __init__(self, parallel: Any) -> None:
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        self._parallel = parallel
        self._nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL) does nothing
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def start(self) -> None:
        if self._thread:
            return
        begun = threading.Event()
        self._over.clear()
        self._thread = threading.Thread(target=self._hold, args=[begun], name="idle team", daemon=True)
        self._thread.start()
        begun.wait()

    def end(self) -> None:
        if self._thread:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _hold(self, begun: threading.Event) -> None:
        cores = len(os.sched_getaffinity(0)) if sys.platform != "darwin" else os.cpu_count() or 1
        self._parallel(self._nothing, None, cores + 1, 0)
        begun.set()
        self._over.wait()


class Pace:
    """Adapts the threads of a context between steps.

    `load` returns the cores that others use, None if unknown: for the first step, since it was made.
    """

    def __init__(
        self, threads: Threads, count: int, load: OtherLoad, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._threads = threads
        self._count = count
        self._load = load
        self._now = now
        self._checked = -math.inf
        self._ended = math.inf  # the last step; none was
        self._busy = False
        self._beyond = 0.0
        policy = own_places().wait_policy
        self._fixed = bool(policy) or count == 1
        self._applied = Setting(0, spin=False)
        self._apply(Setting(count, spin=policy != "sleep"))
        self._trial = _Trial(self._settings(), now)

    @property
    def num_threads(self) -> int:
        """The threads of the last step."""
        return self._applied.threads

    def begin(self, num_tokens: int) -> float:
        """Set the threads for a step; return what `end` takes."""
        if self._fixed:
            return 0.0
        start = self._now()
        if start - self._checked >= CHECK_S:
            self._check(start)
        decodes = num_tokens <= DECODE_TOKENS
        self._apply(self._trial.setting(num_tokens) if decodes else self._settings()[0])
        return self._now()

    def end(self, num_tokens: int, began: float) -> None:
        """Take the time of a step that was computed."""
        if self._fixed:
            return
        self._ended = self._now()
        if num_tokens <= DECODE_TOKENS:
            self._trial.took(num_tokens, self._ended - began)

    def _check(self, now: float) -> None:
        """Look at the load by others."""
        self._checked = now
        others = self._load.cores()
        if others is None:
            return
        if now - self._ended > PAUSE_S:  # the mean of a pause: what ran then may have ended
            others = min(others, self._load.runnable())
        self._beyond = others - max(0, self._load.num_cores - self._count)
        busy = self._beyond > (QUIET_BELOW if self._busy else BUSY_ABOVE)
        if busy != self._busy:
            self._busy = busy
            self._trial = _Trial(self._settings(), self._now)

    def _settings(self) -> list[Setting]:
        """Return the settings that may be the fastest now: the first one is for prompts, and until there are times."""
        one, half = Setting(1, spin=True), Setting(max(self._count // 2, 1), spin=True)
        if not self._busy:
            return list(dict.fromkeys([Setting(self._count, spin=True), half, one]))
        taken = math.ceil(self._beyond - QUIET_BELOW)  # spinning threads need cores of their own
        free = Setting(max(1, self._count - taken), spin=True)
        settings = [free, one]
        if self._threads.can_sleep:
            shared = SLEEPING * self._count**2 / (self._count + self._beyond)  # each thread gets its share of the cores
            settings.insert(int(shared <= free.threads), Setting(self._count, spin=False))
        return list(dict.fromkeys(settings))

    def _apply(self, setting: Setting) -> None:
        if setting.threads != self._applied.threads:
            self._threads.set(setting.threads, setting.threads)
        if setting.spin != self._applied.spin:
            self._threads.spin(SPIN_US if setting.spin else 0)
        self._applied = setting


class _Trial:
    """Finds the fastest of some settings for decode steps, by the times of steps of one length, again and again."""

    def __init__(self, settings: list[Setting], now: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._best = settings[0]
        self._times: dict[Setting, float] = {}  # seconds of a step, by the last trial, or more recently
        self._recent: deque[float] = deque(maxlen=FRESH_STEPS)  # with the best setting
        self._length = 0  # tokens of the steps that count
        self._streak = 0
        self._plan: deque[Setting] = deque()  # of the trial that goes on
        self._tried: dict[Setting, list[float]] = {}
        self._began = self._next = now()

    def setting(self, num_tokens: int) -> Setting:
        """Return the setting for a step."""
        if self._plan and num_tokens == self._length:
            return self._plan[0]
        if not self._plan and self._streak >= STREAK and len(self._settings) > 1 and self._now() >= self._next:
            self._began = self._now()
            self._tried = {setting: [] for setting in self._settings}
            order = [self._best, *(setting for setting in self._settings if setting != self._best)]
            self._plan.extend(setting for _ in range(TRIAL_ROUNDS) for setting in order for _ in range(TRIAL_STEPS))
            return self._plan[0]
        return self._best

    def took(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a step with the setting that was returned for it."""
        if num_tokens != self._length:
            self._streak, self._length = 1, num_tokens
            self._plan.clear()
            self._recent.clear()
            return
        self._streak += 1
        if self._plan:
            self._take_trial(seconds)
            return
        self._recent.append(seconds)
        if len(self._recent) == FRESH_STEPS and self._times:
            self._times[self._best] = statistics.fmean(self._recent)
            self._recent.clear()
            self._choose()

    def _take_trial(self, seconds: float) -> None:
        setting = self._plan.popleft()
        times = self._tried[setting]
        times.append(seconds)
        counted = {tried: _counted(times) for tried, times in self._tried.items()}
        best = min((statistics.median(times) for times in counted.values() if times), default=0.0)
        if counted[setting] and min(counted[setting]) > HOPELESS * best:
            self._plan = deque(planned for planned in self._plan if planned != setting)
        if not self._plan:
            self._times = {tried: statistics.median(times) for tried, times in counted.items()}
            now = self._now()
            self._next = now + max(TRY_AGAIN * (now - self._began), TRY_AGAIN_S)
            self._recent.clear()
            self._choose()

    def _choose(self) -> None:
        fastest = min(self._times, key=lambda setting: self._times[setting])
        if self._times[fastest] * CLEARLY < self._times[self._best]:
            self._best = fastest


def _counted(times: list[float]) -> list[float]:
    """Return the times without the first of each round."""
    return [seconds for index, seconds in enumerate(times) if index % TRIAL_STEPS]
