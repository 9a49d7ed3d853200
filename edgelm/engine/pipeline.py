"""StepPipeline: runs steps on the executor, and launches the next one before the last is read where that is allowed.

Owns the step that was launched ahead, and the times from which the clock learns. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgelm.base.errors import EdgeLMError
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Executor, Masks, PendingSamples, Sampled, Step
from edgelm.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on the device; times are of `perf_counter`."""

    step: Step
    samples: PendingSamples
    launched_at: float
    running_at: float  # the device has work from then on


class _UnreadPrefill(NamedTuple):
    """Launched prefill that the host has not waited for."""

    since: float = 0.0
    tokens: int = 0


class StepPipeline:
    """Runs the steps of a scheduler on an executor, in order."""

    def __init__(self, executor: Executor, scheduler: Scheduler, clock: StepClock) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._clock = clock
        self._ahead: _Launched | None = None
        self._read_at = 0.0  # when the last step was read; 0: the device was idle since
        self._unread_prefill = _UnreadPrefill()
        self.step_s = 0.0  # time of the last step

    @property
    def launched(self) -> Step | None:
        """The step that was launched ahead: it has to be run next."""
        return self._ahead.step if self._ahead else None

    def run(self, step: Step) -> list[list[Sampled]]:
        """Return the samples of a step; the next step is launched before they are read, if it can do without them.

        Raises EngineError. `reset` has to follow any exception.
        """
        current, self._ahead = self._ahead or self._launch_now(step), None
        ahead = self._launch_ahead(step)
        sampled = current.samples.read()
        self._observe(current)
        self._ahead = ahead
        return sampled

    def reset(self) -> None:
        """Give up the step that was launched ahead, and measure no gap and no time across this moment."""
        self._ahead, self._read_at, self._unread_prefill = None, 0.0, _UnreadPrefill()

    def _launch_now(self, step: Step) -> _Launched:
        launched = self._launch(step)
        if self._read_at and step.num_tokens == step.num_rows:
            self._clock.observe_gap(launched.running_at - self._read_at)
        return launched

    def _launch_ahead(self, step: Step) -> _Launched | None:
        """Launch the step after `step`, unless it depends on the samples of `step`.

        With recurrent states, a failure here is one of `step` too.
        """
        ahead = self._scheduler.plan_ahead(step)
        try:
            return self._launch(ahead) if ahead else None
        except EdgeLMError as error:  # `step` is not affected, and a cause that persists fails the next step
            if self._executor.info.num_states:  # but states may have moved
                raise
            log.warning("a step could not be launched ahead: %s", error)
            return None

    def _launch(self, step: Step) -> _Launched:
        launched_at = time.perf_counter()  # after drafting, which is no part of the cost of a row
        self._executor.forward(step)
        running_at = time.perf_counter()
        masks = grammar_masks(step, self._executor.info.num_vocab)
        return _Launched(step, self._executor.sample(step, masks), launched_at, running_at)

    def _observe(self, current: _Launched) -> None:
        """Let the clock learn from a step that was read.

        If the executor runs ahead, reading a step without samples does not wait: its time is part of the next step's.
        """
        began = self._unread_prefill.since or max(current.launched_at, self._read_at)
        now = time.perf_counter()
        if self._executor.info.runs_ahead and not current.step.num_rows:
            self._unread_prefill = _UnreadPrefill(began, self._unread_prefill.tokens + current.step.num_tokens)
        else:
            if not any(chunk.is_picture for chunk in current.step.chunks):  # encoding takes a time of its own
                self._clock.observe(current.step, now - began, self._unread_prefill.tokens)
            self._read_at, self._unread_prefill = now, _UnreadPrefill()
        self.step_s = now - began


def grammar_masks(step: Step, num_vocab: int) -> Masks | None:
    """Return the masks of a step's sampled rows, in their order; None: no sequence has a grammar."""
    if all(chunk.seq.matcher is None for chunk in step.chunks):
        return None
    masks = np.full((step.num_rows, (num_vocab + 31) // 32), -1, np.int32)  # every bit is set: all tokens are allowed
    first = 0
    for chunk in step.chunks:
        if chunk.seq.matcher and chunk.rows:
            chunk.seq.matcher.fill(chunk.draft, masks[first : first + chunk.rows])
        first += chunk.rows
    return masks
