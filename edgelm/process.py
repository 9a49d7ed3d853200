"""What every process that holds an engine does first and last: its standard streams, its one job, its end.

    standard input    one line of JSON, the job; when it closes, the process ends at once
    standard output   one line of JSON an event; `error` is always the last
    standard error    what llama.cpp, Python and a dying process print

Owns that protocol and the loading of the model, so that a crash of native code is one clear line in the parent. Knows
nothing of what is done with the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from edgelm.build import Loaded, build
from edgelm.config import Settings, own_places
from edgelm.errors import EdgeLMError

Emit = Callable[..., None]
Work = Callable[[Loaded, dict[str, Any], Emit], Coroutine[Any, Any, None]]
Job = Callable[[dict[str, Any], Emit], None]

ENDING_S = 1.8  # to save what the next process can use; the parent waits 2 s
_endings: list[Callable[[], None]] = []  # there is one standard input, and one end


def run_process(work: Work) -> int:
    """Load the model of the job that standard input names, do the work, and return the exit code."""
    return run_child(lambda job, emit: work_with_engine(work, job, emit))


def work_with_engine(work: Work, job: dict[str, Any], emit: Emit) -> None:
    """Load the model of a job, do the work with its engine, and close it."""
    loaded = _load(job, emit)

    def save() -> None:
        loaded.chats.save()
        loaded.engine.stop()

    _endings.append(save)
    try:
        asyncio.run(work(loaded, job, emit))
    finally:
        save()
        loaded.engine.close()


def run_child(do: Job) -> int:
    """Do the job that standard input names, and return the exit code."""
    emit = _take_stdout()
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if job["verbose"]:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        do(job, emit)
    except EdgeLMError as error:
        emit(event="error", message=error.message, hint=error.hint)
        return 1
    except MemoryError:
        emit(event="error", message="memory ran out", hint="lower --ctx, or take a smaller model")
        return 1
    except Exception as error:  # noqa: BLE001 - the edge of the process: its parent shows one line
        traceback.print_exc()
        emit(event="error", message=f"edgelm failed: {type(error).__name__}: {error}", hint="-v shows where")
        return 1
    return 0


def _take_stdout() -> Emit:
    """Keep standard output for events; what else writes there goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(**event: Any) -> None:
        try:
            print(json.dumps(event), file=out, flush=True)
        except BrokenPipeError:
            os._exit(1)  # the parent is gone

    return emit


def _end_with_parent() -> None:
    """End this process when its parent closes standard input or dies; no native call can hold it up for long."""
    while os.read(0, 4096):
        pass
    limit = threading.Timer(ENDING_S, os._exit, [1])
    limit.daemon = True
    limit.start()
    try:
        for ending in _endings:
            ending()
    finally:
        os._exit(1)


def _load(job: dict[str, Any], emit: Emit) -> Loaded:
    def progress(share: float) -> bool:
        emit(event="progress", share=round(share, 3))
        return True

    return build(
        Path(job["model"]),
        Settings(**job["settings"]),
        least_context=job.get("least_context", 0),
        repack=job["repack"],
        progress=progress,
        prefixes=Path(job["prefixes"]) if job.get("prefixes") else None,
        places=own_places() if job.get("drafts") else None,
    )
