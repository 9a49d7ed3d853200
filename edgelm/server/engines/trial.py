"""The trial of both engines on a GPU, in the first idle minute of a front whose engines use that GPU.

Owns when it begins and that it ends for a request. The worker jobs/engine_trial.py measures.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from edgelm.backends.kept_trials import MakeTrial, TrialEnded
from edgelm.base.errors import EdgeLMError
from edgelm.base.machine.gpu import has_torch
from edgelm.base.workers.parent import Worker
from edgelm.server.engines.table import EngineTable

WORKER = "edgelm.jobs.engine_trial"
IDLE_S = 60.0
POLL_S = 5.0
WATCH_S = 0.5

log = logging.getLogger(__name__)


async def try_when_idle(
    table: EngineTable, cache: Path, *, idle_s: float = IDLE_S, poll_s: float = POLL_S, command: tuple[str, ...] = ()
) -> None:
    """Make the trial once, when llama.cpp has used a GPU and nobody asks for anything for `idle_s`.

    One that a request ended is made in the next idle minute.
    """
    if not has_torch():
        return
    while True:
        await asyncio.sleep(poll_s)
        if _is_idle(table, idle_s) and await _try(table, cache, command):
            return


async def _try(table: EngineTable, cache: Path, command: tuple[str, ...]) -> bool:
    """Make the trial; return whether it came to its end."""
    worker = Worker(WORKER, replies=(TrialEnded,), command=command)
    try:
        worker.send(MakeTrial(cache))
        reply = asyncio.ensure_future(worker.areceive())
        while not reply.done():
            await asyncio.wait({reply}, timeout=WATCH_S)
            if not all(slot.is_idle for slot in table.all_slots()):
                reply.cancel()
                return False
        ended = reply.result()
        if ended is not None and ended.line:
            log.warning("both engines were tried on this GPU: %s, from the next load on", ended.line)
    except EdgeLMError as error:
        log.warning("the engines were not tried: %s", error)
    finally:
        worker.kill()
        await worker.aclose()
    return True


def _is_idle(table: EngineTable, idle_s: float) -> bool:
    """Return whether engines are loaded, llama.cpp uses a GPU in one, and none had a request for so long."""
    slots = table.all_slots()
    uses_gpu = any(slot.footprint is not None and slot.footprint.device == "gpu" for slot in slots)
    return uses_gpu and all(slot.is_idle and slot.idle_s >= idle_s for slot in slots)
