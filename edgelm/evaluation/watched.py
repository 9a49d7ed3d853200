"""An executor under a watchdog, for work that no engine runs: an evaluation asks it from a thread of its own.

Owns which calls are watched, and the tokens that a GPU may still have to compute in them. The limits are those of
the watchdog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import DeviceError
from edgelm.engine.core import Executor, ExecutorInfo, Masks, PendingSamples, Step
from edgelm.engine.watchdog import Watchdog


class WatchedExecutor:
    """An `Executor` for one thread, the one that makes it; `on_hang` is called by another one if a call hangs.

    The executor of another device may work between two calls, so only the calls themselves are watched.
    """

    def __init__(self, executor: Executor, on_hang: Callable[[DeviceError], None]) -> None:
        self._executor = executor
        self._num_unread = 0  # tokens of the steps since the last read: a GPU may still compute them
        self._watchdog = Watchdog(executor.info, on_hang)
        self._watchdog.start()

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def forward(self, step: Step) -> None:
        self._num_unread += step.num_tokens
        with self._working():
            self._executor.forward(step)

    def sample(self, step: Step, masks: Masks | None) -> PendingSamples:
        with self._working():
            return self._executor.sample(step, masks)

    def logits(self, step: Step) -> NDArray[np.float32]:
        with self._working():
            logits = self._executor.logits(step)
        self._num_unread = 0
        return logits

    def close(self) -> None:
        """End the watch. The executor belongs to the caller."""
        self._watchdog.close()

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._watchdog.begin(f"the evaluation of {self._num_unread:,} tokens", self._num_unread)
        try:
            yield
        finally:
            self._watchdog.work = None
