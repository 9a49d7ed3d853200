"""The trial of both engines on a GPU, in the first idle minute of a front whose engines use that GPU.

Owns when it begins and that it ends for a request. jobs/engine_trial.py measures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edgelm.backends.kept_trials import Trial
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine.gpu import has_torch
from edgelm.base.workers.parent import in_daemon_thread
from edgelm.jobs.engine_trial import NotWantedError, make_trial, trial_is_due
from edgelm.server.engines.table import EngineTable

IDLE_S = 60.0
POLL_S = 5.0

log = logging.getLogger(__name__)


async def try_when_idle(
    table: EngineTable,
    cache: Path,
    *,
    is_due: Callable[[Path], bool] = trial_is_due,
    make: Callable[..., Trial] = make_trial,
    idle_s: float = IDLE_S,
    poll_s: float = POLL_S,
) -> None:
    """Make the trial once, when llama.cpp has used a GPU and nobody asks for anything for `idle_s`.

    One that a request ended is made in the next idle minute.
    """
    if not has_torch():
        return
    while True:
        await asyncio.sleep(poll_s)
        if not _is_idle(table, idle_s):
            continue
        wanted = asyncio.Event()  # by a request
        watching = asyncio.create_task(_note_request(table, wanted, poll_s / 10))
        try:
            if await in_daemon_thread(lambda: is_due(cache)):
                log.warning("idle: both engines are tried on this GPU, once")
                trial = await in_daemon_thread(partial(_make, make, cache, wanted))
                log.warning("%s, from the next load on", trial.line)
            return
        except NotWantedError:
            continue
        except EdgeLMError as error:
            log.warning("the engines were not tried: %s", error)
            return
        finally:
            wanted.set()  # also where this front ends
            watching.cancel()


def _make(make: Callable[..., Trial], cache: Path, wanted: asyncio.Event) -> Trial:
    return make(cache, is_wanted=lambda: not wanted.is_set())


async def _note_request(table: EngineTable, wanted: asyncio.Event, poll_s: float) -> None:
    while not wanted.is_set():
        await asyncio.sleep(poll_s)
        if not all(slot.is_idle for slot in table.all_slots()):
            wanted.set()


def _is_idle(table: EngineTable, idle_s: float) -> bool:
    """Return whether engines are loaded, llama.cpp uses a GPU in one, and none had a request for so long."""
    slots = table.all_slots()
    uses_gpu = any(slot.footprint is not None and slot.footprint.device == "gpu" for slot in slots)
    return uses_gpu and all(slot.is_idle and slot.idle_s >= idle_s for slot in slots)
