"""Watchdog: notices that a thread hangs that computes or loads, in a call of the driver from which no exception comes.

Owns a thread that looks now and then, and the limits:

- our kernels on a GPU: 60 s and 0.1 s for each token of the step. No GPU that holds a model computes fewer than ten
  tokens of a prompt a second. Work without tokens, such as each piece of loading: 360 s;
- all else, such as llama.cpp: ten minutes in which the thread used no processor time. A processor that computes uses it
  however slow it is, and so does one that reads the model from a slow disk.

Time is counted in the watchdog's own ticks, so a machine that sleeps, or a process that is stopped, hangs no step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from edgelm.base.errors import DeviceError
from edgelm.engine.core import Step

TICK_S = 2.0
GPU_S = 60.0
GPU_TOKEN_S = 0.1
GPU_OTHER_S = 360.0  # for work without tokens: vectors, saving; a piece of loading, such as a kernel to be compiled
IDLE_S = 600.0  # without processor time
LEAST_CPU_S = 0.001  # of a tick, for a thread that does something
OTHER_WORK = "the engine's work"


class Place(Protocol):
    """The engine and the device of the work: those of an executor, or those that were chosen."""

    @property
    def engine(self) -> str: ...
    @property
    def device(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A piece of work that is no step; without tokens it may take GPU_OTHER_S."""

    name: str
    num_tokens: int


class Watchdog:
    """Calls `on_hang` once, from a thread of its own, if the thread that set `work` hangs.

    `work` is an object for each piece of work, and None while the thread waits for work: to set it is all that a step
    costs.
    """

    def __init__(self, place: Place, on_hang: Callable[[DeviceError], None], tick_s: float = TICK_S) -> None:
        self.work: Step | Work | None = None
        self._on_gpu = place.engine == "torch" and place.device != "cpu"
        self._on_hang = on_hang
        self._tick_s = tick_s
        self._clock: int | None = None  # of the processor time of the watched thread
        self._awake = threading.Event()
        self._closed = False

    def start(self) -> None:
        """Watch the calling thread."""
        with suppress(AttributeError):  # macOS does not tell the processor time of a thread
            # Asked for here, since to ask for the clock of a thread that has ended crashes the process.
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, name: str = OTHER_WORK, num_tokens: int = 0) -> None:
        """Note that the thread begins a piece of work."""
        rested, self.work = self.work is None, Work(name, num_tokens)
        if rested:
            self._awake.set()

    def close(self) -> None:
        self._closed = True
        self._awake.set()

    def _watch(self) -> None:
        seen, elapsed_s, cpu_s = self.work, 0.0, 0.0
        while not self._closed:
            if self.work is None:
                self._awake.wait()
                self._awake.clear()
            before = time.monotonic()
            time.sleep(self._tick_s)
            now, work, used_s = time.monotonic(), self.work, self._cpu_s()
            if work is not seen or work is None or (not self._on_gpu and used_s - cpu_s > LEAST_CPU_S):
                seen, elapsed_s = work, 0.0
            else:
                elapsed_s += min(now - before, 2 * self._tick_s)
                if elapsed_s > self._limit_s(work):
                    self._on_hang(self._error(work, elapsed_s))
                    return
            cpu_s = used_s

    def _limit_s(self, work: Step | Work) -> float:
        if not self._on_gpu:
            return IDLE_S
        return GPU_S + GPU_TOKEN_S * work.num_tokens if work.num_tokens else GPU_OTHER_S

    def _error(self, work: Step | Work, elapsed_s: float) -> DeviceError:
        subject = f"a step of {work.num_tokens:,} tokens" if isinstance(work, Step) else work.name
        device, hint = ("GPU", "see what nvidia-smi says") if self._on_gpu else ("engine", "see the log with -v")
        return DeviceError(f"the {device} hangs: {subject} did not end within {elapsed_s:.0f} s", f"try again; {hint}")

    def _cpu_s(self) -> float:
        """Return the processor time of the watched thread, or time itself: then nothing looks like a hang."""
        try:
            return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return time.monotonic()
