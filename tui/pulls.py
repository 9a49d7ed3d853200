"""The pulls that the chat has started: one worker process each, so that no answer waits for a pull.

Owns the processes and the progress that they report (library/progress.py has the messages). Knows nothing of the hub
and of widgets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from textual.worker import WorkerError

from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.places import HUB_TOKENS
from edgelm.client.work import Work
from edgelm.library.catalog import FIRST_CHAT
from edgelm.library.progress import (
    EVENTS,
    Checking,
    Event,
    Listed,
    Progress,
    Pulled,
    PullJob,
    Retrying,
    StandingIn,
    Waiting,
    Wrong,
    size_text,
    time_text,
)

WORKER = "edgelm.library.pull_worker"
COMMAND: tuple[str, ...] = ()  # replaces the worker in tests
STOP_S = 3.0  # for a worker to end after its standard input was closed

State = Literal["running", "done", "failed", "stopped"]


@dataclass(eq=False)
class Pull:
    """One pull: its progress, and how it ended."""

    model: str
    chat_id: int  # the chat that started it
    activity: str = "asking the hub"
    done: int = 0  # bytes
    total: int = 0
    rate: float = 0.0  # bytes per second
    seconds_left: float | None = None
    state: State = "running"
    path: str = ""  # of the model, when it is done
    error: str = ""
    stand_in: str = ""  # the model that is pulled in its place

    def take(self, event: Event) -> None:
        """Apply an event of the worker."""
        match event:
            case Listed(files=files):
                self.total = sum(file.size for file in files)
                self.done = sum(file.here for file in files)
                self.activity = ""
            case Progress():
                self.done, self.total = event.done, event.total
                self.rate, self.seconds_left = event.rate, event.seconds_left
                self.activity = "" if self.rate else self.activity
            case Waiting():
                self.activity = "another process pulls it"
            case Retrying(_, reason, wait_s):
                self.activity = f"{reason}; again in {wait_s:.0f} s"
            case StandingIn(_, model):
                self.stand_in = model
                self.activity = f"the hub cannot be reached; pulling {model} in its place"
            case Checking():
                self.activity = "verifying a file"
            case Wrong():
                self.activity = "a file is damaged; pulling it again"
            case Pulled():
                self.state, self.path = "done", str(event.path)

    @property
    def again(self) -> str:
        """Return what another pull does with one that was stopped: pip keeps no part."""
        return "begins it anew" if FIRST_CHAT in (self.model, self.stand_in) else "continues it"

    @property
    def progress(self) -> list[str]:
        """Return the progress as texts, the most important first."""
        if not self.total:
            return [self.activity]
        parts = [f"{100 * self.done / self.total:.0f} %", f"{size_text(self.done)} of {size_text(self.total)}"]
        if self.activity:
            return [*parts, self.activity]
        if self.rate:
            parts.append(f"{size_text(self.rate)}/s")
        if self.seconds_left is not None:
            parts.append(f"{time_text(self.seconds_left)} left")
        return parts


class Pulls:
    """Starts and stops pulls. `run` starts a coroutine; `changed` and `ended` are called for each pull."""

    def __init__(
        self,
        run: Callable[[Coroutine[Any, Any, None]], Work],
        changed: Callable[[], None],
        ended: Callable[[Pull], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._run = run
        self._changed = changed
        self._ended = ended
        self._command = tuple(command)
        self._running: dict[str, tuple[Pull, Work]] = {}  # by model

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[Pull]:
        return [pull for pull, _ in self._running.values()]

    def start(self, model: str, chat_id: int) -> Pull:
        """Pull a model. Raises RequestError if it is being pulled."""
        if model in self._running:
            raise RequestError(f"{model} is being pulled already", "/pull stop ends it")
        pull = Pull(model, chat_id)
        self._running[model] = pull, self._run(self._pull(pull))
        self._changed()
        return pull

    def stop(self, model: str = "") -> list[Pull]:
        """Stop the pull of a model, or all; return those that ran. Partial files are kept."""
        stopped = [(pull, worker) for pull, worker in self._running.values() if model in ("", pull.model)]
        for _, worker in stopped:
            worker.cancel()
        return [pull for pull, _ in stopped]

    async def end(self) -> None:
        """Stop all pulls and wait until their processes have ended."""
        workers = [worker for _, worker in self._running.values()]
        self.stop()
        for worker in workers:
            with suppress(WorkerError):
                await worker.wait()

    async def _pull(self, pull: Pull) -> None:
        from edgelm.base.workers.parent import Worker  # after the first paint

        worker: Worker | None = None
        try:
            worker = Worker(WORKER, replies=EVENTS, keys=HUB_TOKENS, grace_s=STOP_S, command=self._command)
            worker.send(PullJob(pull.model))
            while pull.state == "running" and (event := await worker.areceive()) is not None:
                pull.take(event)
                self._changed()
            if pull.state == "running":
                pull.state = "failed"
                pull.error = f"the pull of {pull.model} broke off; pull it again to continue"
        except asyncio.CancelledError:
            pull.state = "stopped"
            raise
        except EdgeLMError as error:
            pull.state, pull.error = "failed", str(error)
        finally:
            if worker is not None:
                await worker.aclose()
            del self._running[pull.model]
            self._changed()
            self._ended(pull)
