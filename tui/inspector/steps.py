"""The last steps of an engine: their history, the step that is shown, and the figures of it.

Knows nothing of widgets and of how events arrive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from edgelm.client.watching import EngineSeen, IdleSeen, KVSeen, LostSeen, Seen, StepSeen

KEPT_STEPS = 500
SPEED_S = 2.0  # the window of tokens per second
IDLE_S = 0.1  # a longer gap between two steps is a pause of the engine


@dataclass(frozen=True, slots=True)
class Shown:
    """A step, and the KV cache as it was told last before it."""

    step: StepSeen
    kv: KVSeen | None


@dataclass(slots=True)
class Request:
    """A request that was seen: when its first chunk and its first token came, in seconds of the server's clock."""

    began_s: float
    first_token_s: float | None = None


@dataclass(slots=True)
class Steps:
    """The last KEPT_STEPS steps of the engine that is watched."""

    engine: EngineSeen | None = None
    kv: KVSeen | None = None
    num_lost: int = 0
    requests: dict[int, Request] = field(default_factory=dict)  # by sequence
    _steps: deque[Shown] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    _paused_at: int | None = None  # the number of the step that is shown; None: the newest

    def take(self, seen: Seen) -> None:
        """Take an event."""
        if isinstance(seen, StepSeen):
            self._steps.append(Shown(seen, self.kv))
            self._note_requests(seen)
        elif isinstance(seen, KVSeen):
            self.kv = seen
        elif isinstance(seen, LostSeen):
            self.num_lost += seen.events
        elif isinstance(seen, EngineSeen):
            self.engine, self.kv, self._paused_at = seen, None, None
            self._steps.clear()
            self.requests.clear()
        elif isinstance(seen, IdleSeen):
            self.engine = None

    def _note_requests(self, step: StepSeen) -> None:
        for chunk in step.chunks:
            request = self.requests.setdefault(chunk.sequence, Request(step.at_s - step.step_ms / 1000))
            if chunk.new and request.first_token_s is None:
                request.first_token_s = step.at_s
        if self._steps and len(self.requests) > KEPT_STEPS:
            kept = {chunk.sequence for shown in self._steps for chunk in shown.step.chunks}
            self.requests = {number: request for number, request in self.requests.items() if number in kept}

    def __len__(self) -> int:
        return len(self._steps)

    # -- the place that is shown -----------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    @property
    def shown(self) -> Shown | None:
        """The step that is shown; None: there is none yet."""
        return self._steps[self._index] if self._steps else None

    @property
    def _index(self) -> int:
        if self._paused_at is None:
            return len(self._steps) - 1
        # The step may be gone: too old, or lost on the way.
        index = bisect_left(self._steps, self._paused_at, key=lambda shown: shown.step.number)
        return min(index, len(self._steps) - 1)

    def toggle_pause(self) -> None:
        """Stop at the newest step, or go on with it."""
        self._paused_at = None if self.is_paused or not self._steps else self._steps[-1].step.number

    def move(self, num_steps: int) -> None:
        """Show a step that is so many later, or earlier if negative; that pauses."""
        if self._steps:
            index = min(max(self._index + num_steps, 0), len(self._steps) - 1)
            self._paused_at = self._steps[index].step.number

    def stop_at(self, number: int) -> None:
        """Pause, and show the step with a number."""
        self._paused_at = number

    def around(self, count: int) -> list[Shown]:
        """Return so many steps, oldest first: up to the shown one, or around it while paused."""
        later = min((count - 1) // 2, len(self._steps) - 1 - self._index) if self.is_paused else 0
        end = self._index + 1 + later
        return [self._steps[index] for index in range(max(end - count, 0), end)] if self._steps else []

    # -- figures ---------------------------------------------------------------------------------------------------

    def tokens_per_second(self) -> float | None:
        """Return the speed over SPEED_S before the shown step, without pauses; None: it is the first step after one."""
        if self.shown is None:
            return None
        last = self.shown.step
        begun_s, num_new, num_steps = last.at_s - last.step_ms / 1000, last.num_new, 1
        for index in range(self._index - 1, -1, -1):
            step = self._steps[index].step
            if step.at_s <= last.at_s - SPEED_S or step.at_s < begun_s - IDLE_S:
                break
            begun_s = step.at_s - step.step_ms / 1000
            num_new += step.num_new
            num_steps += 1
        return num_new / max(last.at_s - begun_s, 1e-6) if num_steps > 1 else None

    def bytes_per_token(self) -> float | None:
        """Return the bytes that the shown step read for a new token: the weights once, and the KV cache."""
        if self.shown is None or self.engine is None or not self.engine.weights_bytes or not self.shown.step.num_new:
            return None
        return self._bytes_read(self.shown.step, self.engine) / self.shown.step.num_new

    def bytes_per_second(self) -> float | None:
        """Return the bytes per second that the shown step read; None for a prompt, where the processor is the limit."""
        step = self.shown.step if self.shown else None
        if step is None or self.engine is None or not self.engine.weights_bytes or step.step_ms <= 0:
            return None
        if any(chunk.is_prompt for chunk in step.chunks):
            return None
        return self._bytes_read(step, self.engine) / (step.step_ms / 1000)

    def _bytes_read(self, step: StepSeen, engine: EngineSeen) -> int:
        depth = sum(chunk.start + chunk.computed for chunk in step.chunks)
        return engine.weights_bytes + depth * engine.kv_bytes_per_token
