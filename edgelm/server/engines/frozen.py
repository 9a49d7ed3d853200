"""Notices an engine process that is frozen: requests use it, it gets no processor time, and it answers nothing.

Owns the limit, and what counts as a sign of life: processor time, an answer to a small request, or a state in which
standing still is right: waiting for a disk or a processor, or held by a debugger. An engine in which a step hangs
answers; `engine/watchdog.py` in its process ends it. Time is counted in the front's own ticks, and begins again when
the machine or this process slept. Knows nothing of what follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

LIMIT_S = 20.0
TICK_S = 2.0
LEAST_CPU_S = 0.001  # of a tick
LEAST_SLEEP_S = 0.5  # of the machine, by its clocks
STILL = "ST"  # states of proc(5): sleeping, and stopped by a signal


class Watched(Protocol):
    """An engine process."""

    def processor_s(self) -> float | None:
        """Return its processor time; None: that is not known, or it has a reason to use none."""

    async def answers(self) -> bool:
        """Return whether it answers at once."""


async def until_frozen(engine: Watched, in_use: asyncio.Event, note: Callable[[float], None]) -> None:
    """Return when an engine is frozen. `note` gets the seconds without a sign of life at each tick in use."""
    now = asyncio.get_running_loop().time
    silent_s, used_s, slept_s = 0.0, engine.processor_s(), suspended_s()
    while silent_s < LIMIT_S:
        await in_use.wait()
        began = now()
        await asyncio.sleep(TICK_S)
        took_s = now() - began
        before_s, used_s = used_s, engine.processor_s()
        slept_before_s, slept_s = slept_s, suspended_s()
        stands_still = used_s is not None and before_s is not None and used_s - before_s < LEAST_CPU_S
        away = took_s > 2 * TICK_S or slept_s - slept_before_s > LEAST_SLEEP_S
        if away or not stands_still or not in_use.is_set() or await engine.answers():
            silent_s = 0.0
        else:
            silent_s += now() - began
        note(silent_s)


def suspended_s() -> float:
    """Return how long the machine has been suspended since it was started; 0 where the system does not tell."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if boottime is None else time.clock_gettime(boottime) - time.clock_gettime(time.CLOCK_MONOTONIC)


def processor_s(pid: int) -> float | None:
    """Return the processor time of a process that stands still; None for others, and where /proc does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return time.clock_gettime((~pid << 3) | 2) if state in STILL else None  # as clock_getcpuclockid(3)
    except (OSError, IndexError):
        return None
