"""The watchdog of an engine: tells of a step that does not end, from a thread of its own.

A call of a GPU's driver may hang for ever, and no exception reaches it. Owns the clock of the step that runs. A process
that was stopped, or a machine that slept, is not taken for a hang: between two looks, only so much time counts as the
watchdog meant to sleep. Knows nothing of what a step does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOKS = 16  # of the watchdog within its limit


class Watchdog:
    """Calls `bark` once, from its own thread, when a step takes longer than `limit_s`."""

    def __init__(self, limit_s: float, bark: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._bark = bark
        self._step = 0  # odd while one runs
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()

    def begin(self) -> None:
        """Note that a step begins."""
        self._step += 1

    def end(self) -> None:
        """Note that the step has ended."""
        self._step += 1

    def _watch(self) -> None:
        pause_s = self._limit_s / LOOKS
        seen, for_s, last = 0, 0.0, time.monotonic()
        while not self._ended.wait(pause_s):
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * pause_s), now
            step = self._step
            for_s = for_s + passed_s if step == seen and step % 2 else 0.0
            seen = step
            if for_s > self._limit_s:
                self._bark()
                return
