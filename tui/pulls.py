"""The pulls that the chat has asked for: each is a process of its own, so that no answer waits for one.

Owns the processes and what they tell (library/pulling.py has the protocol). Knows nothing of the hub and of widgets.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from textual.worker import Worker, WorkerError

from edgelm.errors import RequestError
from edgelm.library.units import size_text, time_text

COMMAND = (sys.executable, "-P", "-m", "edgelm.library.pulling")
MAX_LINE = 2**24  # bytes; the first one names all files
STOP_S = 3.0  # for a process to end after its standard input

State = Literal["running", "done", "failed", "stopped"]


@dataclass(eq=False)
class Pull:
    """One model that is being pulled, and how it ended."""

    model: str
    chat_id: int  # which chat wants it
    activity: str = "asking the hub"
    done: int = 0  # bytes
    total: int = 0
    rate: float = 0.0  # bytes per second
    seconds_left: float | None = None
    state: State = "running"
    path: str = ""  # where it is, when it is done
    error: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Note what the process tells."""
        match event.get("event"):
            case "listed":
                self.total = sum(file["size"] for file in event["files"])
                self.done = sum(file["here"] for file in event["files"])
                self.activity = ""
            case "progress":
                self.done, self.total = event["done"], event["total"]
                self.rate, self.seconds_left = event["rate"], event["seconds_left"]
                self.activity = "" if self.rate else self.activity
            case "waiting":
                self.activity = "another process pulls it"
            case "retrying":
                self.activity = f"{event['reason']}; again in {event['wait_s']:.0f} s"
            case "checking":
                self.activity = "checking what came"
            case "wrong":
                self.activity = "a file came wrong: it comes again"
            case "done":
                self.state, self.path = "done", event["path"]
            case "error":
                self.state = "failed"
                self.error = "; ".join(filter(None, (event["message"], event.get("hint", ""))))

    @property
    def progress(self) -> list[str]:
        """Return how far it is, the most important first."""
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
    """Starts and stops pulls. `run` makes a worker of a coroutine; `changed` and `ended` hear of each."""

    def __init__(
        self,
        run: Callable[[Coroutine[Any, Any, None]], Worker[None]],
        changed: Callable[[], None],
        ended: Callable[[Pull], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._run = run
        self._changed = changed
        self._ended = ended
        self._command = command
        self._running: dict[str, tuple[Pull, Worker[None]]] = {}  # by model

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def running(self) -> list[Pull]:
        return [pull for pull, _ in self._running.values()]

    def start(self, model: str, chat_id: int) -> Pull:
        """Pull a model. Raises RequestError where that is being done."""
        if model in self._running:
            raise RequestError(f"{model} is being pulled already", "/pull stop ends it")
        pull = Pull(model, chat_id)
        self._running[model] = pull, self._run(self._pull(pull))
        self._changed()
        return pull

    def stop(self, model: str = "") -> list[Pull]:
        """Stop the pull of a model, or all; return those that ran. What came is kept."""
        stopped = [each for each in self._running.values() if model in ("", each[0].model)]
        for _, worker in stopped:
            worker.cancel()
        return [pull for pull, _ in stopped]

    async def end(self) -> None:
        """Stop all pulls, and wait until their processes are gone."""
        workers = [worker for _, worker in self._running.values()]
        self.stop()
        for worker in workers:
            with suppress(WorkerError):
                await worker.wait()

    async def _pull(self, pull: Pull) -> None:
        process: Process | None = None
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_LINE,
                start_new_session=True,  # the terminal's signals are for the screen
            )  # fmt: skip
            await self._listen(process, pull)
        except asyncio.CancelledError:
            pull.state = "stopped"
            raise
        except OSError as error:
            pull.state, pull.error = "failed", f"no process can be started: {error.strerror}"
        finally:
            if process is not None:
                await _end(process)
            del self._running[pull.model]
            self._changed()
            self._ended(pull)

    async def _listen(self, process: Process, pull: Pull) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"model": pull.model}).encode() + b"\n")
        try:
            while pull.state == "running" and (line := await process.stdout.readline()):
                pull.take(json.loads(line))
                self._changed()
        except (ValueError, KeyError, TypeError, ConnectionError):
            pass  # half a line of one that was killed
        if pull.state == "running":
            pull.state = "failed"
            pull.error = f"the pull of {pull.model} broke off; pull it again to continue"


async def _end(process: Process) -> None:
    """Let a process end, which it does when its standard input closes; kill it where it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
