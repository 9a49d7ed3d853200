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
from edgelm.config import Settings
from edgelm.errors import EdgeLMError

Emit = Callable[..., None]
Work = Callable[[Loaded, dict[str, Any], Emit], Coroutine[Any, Any, None]]


def run_process(work: Work) -> int:
    """Load the model of the job that standard input names, do the work, and return the exit code."""
    emit = _take_stdout()
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if job["verbose"]:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        loaded = _load(job, emit)
        try:
            asyncio.run(work(loaded, job, emit))
        finally:
            loaded.engine.close()
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
    """End this process when its parent closes standard input or dies; no native call can hold it up."""
    while os.read(0, 4096):
        pass
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
    )
