"""A worker that does one job with a model (`run`, `bench`, `embed`, `eval`), and what many commands print: progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from edgelm.base.errors import EdgeLMError, GpuLoadError
from edgelm.base.machine import facts as machine
from edgelm.base.places import Places
from edgelm.base.workers.exit_reason import ModelFiles, exit_reason
from edgelm.base.workers.messages import (
    EngineJob,
    EvalRestarted,
    EvalState,
    Loading,
    Note,
    Read,
    Result,
    Status,
    Text,
    Thought,
)
from edgelm.base.workers.parent import Worker
from edgelm.jobs.embed_request import Vector
from edgelm.library.local import find_draft_model
from edgelm.library.scan import note_use

WORKER = "edgelm.jobs.worker"
LINE_INTERVAL_S = 10.0  # between two lines of progress for a pipe or a file
SILENT_S = 1.0  # saving takes this long before a line reports it
REPLIES = (Loading, Status, Note, Read, Text, Thought, EvalState, EvalRestarted, Vector, Result)


@contextmanager
def run_job(job: EngineJob, places: Places, verbose: bool) -> Iterator[Iterator[Any]]:
    """Start a worker for `job` and give its replies up to the result. The worker is gone when the block ends.

    Sets `repack` of the job, and removes the keys from its settings. Raises EdgeLMError: the worker's own error, how it
    died, that a model's file changed in the meantime, that there is no such draft model, or that llama.cpp cannot run
    on this machine.
    """
    status = StatusLine(sys.stderr.isatty())
    facts = machine.facts(places.cache, notify=status.show)
    facts.require_working()
    status.show(f"loading {job.model.name}")
    draft = find_draft_model(job.settings, places.hub) if job.drafts else None
    files = ModelFiles(job.model, *([draft.path] if draft else []))
    echo = "" if verbose else None
    flags = ["-v"] if verbose else []

    def start() -> Worker:
        on_saving = _Saving(status).show
        return Worker(
            WORKER,
            *flags,
            replies=REPLIES,
            errors=(GpuLoadError,),
            environment=facts.environment,
            echo=echo,
            on_saving=on_saving,
        )

    job = replace(job, settings=job.settings.without_keys, repack=facts.repack)
    with ExitStack() as workers:
        workers.callback(status.clear)
        replies = _from_workers(start, workers, job, files, status)
        yield _watch(replies, status, job.model.name, lambda: note_use(places.data, job.model))


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the block without an error if the reader of standard output (`head`, a pager) has left."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the buffered rest


def _from_workers(
    start: Callable[[], Worker], workers: ExitStack, job: EngineJob, files: ModelFiles, status: StatusLine
) -> Iterator[Any]:
    """Yield the replies of a worker; where CUDA cannot load the model, those of another, which goes on without it."""
    while True:
        worker = workers.enter_context(start())
        worker.send(job)
        try:
            yield from _replies(worker, files)
            return
        except GpuLoadError as error:
            worker.close()
            status.clear()
            print(f"note: CUDA is not used: {error}", file=sys.stderr)
            job = replace(job, cuda_problem=error.message)


def _replies(worker: Worker, files: ModelFiles) -> Iterator[Any]:
    """Yield the replies up to the result. Raises EdgeLMError."""
    try:
        for reply in worker.replies():
            if isinstance(reply, Result):
                if files.rewritten():
                    raise files.change()
                yield reply
                return
            yield reply
    except EdgeLMError as error:
        raise (files.change() if files.rewritten() else error) from None
    raise exit_reason(worker.exit(), files)


def _watch(replies: Iterator[Any], status: StatusLine, name: str, on_loaded: Callable[[], None]) -> Iterator[Any]:
    """Show progress and notes, and yield all other replies. The first of those means that the model is loaded."""
    loaded = False
    try:
        for reply in replies:
            if isinstance(reply, Loading):
                status.show(f"loading {name} {reply.share:.0%}")
                continue
            if isinstance(reply, Status):
                status.show(reply.text)
                continue
            if isinstance(reply, Note):
                status.clear()
                print(f"note: {reply.text}", file=sys.stderr)
                continue
            if not loaded:
                on_loaded()
                loaded = True
            status.clear()
            yield reply
    finally:
        status.clear()


class StatusLine:
    """A line on standard error that overwrites itself; elsewhere than on a terminal, a new one now and then."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._shown = ""
        self._next_line = time.monotonic() + LINE_INTERVAL_S

    def show(self, text: str) -> None:
        if self._terminal and text != self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = text
        elif not self._terminal and time.monotonic() >= self._next_line:
            print(text, file=sys.stderr, flush=True)
            self._next_line = time.monotonic() + LINE_INTERVAL_S

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


class _Saving:
    """The line for conversations that the worker saves at its end, once that takes long."""

    def __init__(self, status: StatusLine) -> None:
        self._status = status
        self._tell_at: float | None = None

    def show(self, num_left: int) -> None:
        now = time.monotonic()
        self._tell_at = self._tell_at or now + SILENT_S
        if now >= self._tell_at:
            self._status.show(f"saving {num_left} conversation{'s' if num_left > 1 else ''}…")
