"""The memory of a front for GPUs that failed, so that `--engine auto` goes on without CUDA.

Owns the rule: a model that CUDA could not load, or whose engine CUDA ended twice within some minutes, is loaded without
it. After a while without a failure, CUDA is tried again when the model is next loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from edgelm.base.errors import DeviceError, EdgeLMError, GpuLoadError

REMEMBERED_S = 600.0
MAX_CRASHES = 2  # of an engine, within REMEMBERED_S


class GpuFailures:
    """The failures of each model's engines."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._crashes: dict[Path, list[float]] = {}  # when
        self._problems: dict[Path, tuple[float, str]] = {}  # since when, and why CUDA is not used

    def note(self, model: Path, error: EdgeLMError) -> None:
        """Note how an engine failed to load, or ended."""
        now = self._now()
        if isinstance(error, GpuLoadError):
            self._problems[model] = now, error.message
        elif isinstance(error, DeviceError):
            recent = [when for when in self._crashes.get(model, []) if now - when < REMEMBERED_S]
            self._crashes[model] = [*recent, now]
            if len(self._crashes[model]) >= MAX_CRASHES:
                times = f"{len(self._crashes[model])} times within {REMEMBERED_S / 60:.0f} minutes"
                self._problems[model] = now, f"it failed {times}, last: {error.message}"

    def problem(self, model: Path) -> str:
        """Return why CUDA is not to be used for a model; empty: it may be."""
        since, problem = self._problems.get(model, (0.0, ""))
        return problem if problem and self._now() - since < REMEMBERED_S else ""
