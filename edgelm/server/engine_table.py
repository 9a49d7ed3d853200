"""All engines of a front: one for each model that is in use.

Owns which of them run: started on demand, ended when idle, or when another model needs their memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

from edgelm.errors import EngineError
from edgelm.library.local import LocalModel
from edgelm.server.engine_slot import EngineSlot, Launch

REAP_S = 5.0  # at most, between two looks for idle engines

log = logging.getLogger(__name__)


class EngineTable:
    """The engines, by the file of their model. A context manager: leaving it ends them all."""

    def __init__(self, launch: Launch, *, idle_timeout_s: float, fits: Callable[[Path], bool] = lambda _: True) -> None:
        self.slots: dict[Path, EngineSlot] = {}
        self._launch = launch
        self._idle_timeout_s = idle_timeout_s  # 0: never
        self._fits = fits  # whether there is memory for a model now; may take a while
        self._closed = False
        self._reaper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._idle_timeout_s:
            self._reaper = asyncio.create_task(self._reap())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def lease(self, model: LocalModel) -> AsyncIterator[EngineSlot]:
        """Give the slot of a model, started if need be, that stays while the block runs. Raises EngineError."""
        slot = await self._slot(model)
        with slot.lease():
            yield slot

    async def close(self) -> None:
        """End all engines; whoever asks for one from now on gets an error."""
        self._closed = True
        if self._reaper is not None:
            self._reaper.cancel()
        reason = "is gone: the server is shutting down"
        await asyncio.gather(*(self._stop(slot, reason) for slot in [*self.slots.values()]))

    async def _slot(self, model: LocalModel) -> EngineSlot:
        room_made = False
        while True:
            if self._closed:
                raise EngineError("the server is shutting down")
            slot = self.slots.get(model.path)
            if slot is None and not room_made:
                await self._make_room(model)
                room_made = True
            elif slot is None:
                self.slots[model.path] = EngineSlot(model, self._launch)
            elif slot.state == "stopping":
                await slot.stopped.wait()
            else:
                return slot

    async def _make_room(self, model: LocalModel) -> None:
        """Unload models that nobody uses, the longest idle first, until there is memory for another."""
        while idle := [slot for slot in self.slots.values() if slot.state == "ready" and not slot.leases]:
            if await asyncio.to_thread(self._fits, model.path):
                return
            victim = max(idle, key=lambda slot: slot.idle_s)
            if not victim.leases:  # nobody came meanwhile
                log.info("%s is unloaded to make room for %s", victim.model.name, model.name)
                await self._stop(victim)

    async def _stop(self, slot: EngineSlot, reason: str = "is being unloaded") -> None:
        await slot.stop(reason)
        if self.slots.get(slot.model.path) is slot:
            del self.slots[slot.model.path]

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(REAP_S, self._idle_timeout_s / 4))
            idle = [slot for slot in self.slots.values() if slot.idle_s >= self._idle_timeout_s]
            for slot in idle:
                if slot.state in ("ready", "failed"):
                    log.info("%s was not used for %.0f s: unloaded", slot.model.name, slot.idle_s)
            await asyncio.gather(*(self._stop(slot) for slot in idle if slot.state in ("ready", "failed")))
