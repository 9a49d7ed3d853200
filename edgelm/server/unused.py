"""The end of a front that `edgelm launch` started: when no agent is left, and nothing was asked for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgelm.server.engines.table import EngineTable

UNUSED_S = 600.0  # where --idle-timeout is 0
POLL_S = 5.0


async def wait_unused(table: EngineTable, agents_run: Callable[[], bool], limit_s: float) -> None:
    """Return when neither an agent ran nor a request used an engine for `limit_s`; 0: for UNUSED_S."""
    limit_s = limit_s or UNUSED_S
    clock = asyncio.get_running_loop().time
    used = clock()
    while clock() - used < limit_s:
        await asyncio.sleep(min(POLL_S, limit_s / 4))
        # An engine may be unloaded before this limit: the time of its last request is kept in `used`.
        used = max(used, clock() - min((slot.idle_s for slot in table.slots.values()), default=limit_s))
        if agents_run():
            used = clock()
