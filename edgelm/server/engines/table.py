"""The engines of a front, one for each model in use: started on demand, ended when idle or to make room for others.

Owns which engines there are, and when they end: after `keep_alive`, on request, or for another model (memory.py).
slots.py owns the life of each. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Self

from edgelm.base.config import DEFAULT_CONTEXT
from edgelm.base.errors import EngineError, StillLoadingError
from edgelm.library.scan import LocalModel
from edgelm.server.engines.memory import AnyMachine, Memory
from edgelm.server.engines.slots import EngineSlot, Launch

TICK_S = 0.01  # least pause between two looks at the clock
UNLOADED = "is being unloaded"
PULLED = ("hub", "ollama")  # the places of models whose name has one path at a time

log = logging.getLogger(__name__)


class EngineTable:
    """The engines by model file. A context manager: leaving it ends them all.

    `idle_timeout_s` is how long an engine stays without a request; 0: for ever, but it makes room for others.
    `keep_alive` gives the value of a model that has its own, and None for the others; `most_context` the tokens that a
    model's settings allow.
    """

    def __init__(
        self,
        launch: Launch,
        machine: AnyMachine,
        *,
        idle_timeout_s: float = 0.0,
        keep_alive: Callable[[LocalModel], float | None] = lambda _: None,
        most_context: Callable[[LocalModel], int] = lambda _: DEFAULT_CONTEXT,
        max_models: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.slots: dict[Path, EngineSlot] = {}
        self.before_unload: Callable[[EngineSlot], Awaitable[None]] = _do_nothing  # for those who count
        self.memory = Memory(
            machine, self.engines, self.unload, self._drain, limit_bytes=limit_bytes, max_models=max_models
        )
        self._launch = launch
        self._idle_timeout_s = idle_timeout_s or math.inf
        self._keep_alive = keep_alive
        self._most_context = most_context
        self._leaving: set[EngineSlot] = set()  # they get no new requests
        self._endings: dict[EngineSlot, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._closed = False
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def lease(self, model: LocalModel, keep_alive_s: float | None = None) -> AsyncIterator[EngineSlot]:
        """Give the slot of a model, and keep it loaded while the block runs, and for `keep_alive_s` after it.

        Infinity pins it: it makes no room for others. None: as an earlier request or the settings say.
        Raises EngineError.
        """
        if (before := self._elsewhere(model)) is not None:
            await self._follow(before, model)
        slot = self._slot(model)
        with slot.lease(keep_alive_s):
            yield slot

    def all_slots(self) -> list[EngineSlot]:
        """Return the slots of models, and those that end."""
        return [*self.slots.values(), *self._leaving]

    def engines(self) -> list[EngineSlot]:
        """Return the slots whose engines have memory, or were promised some."""
        return [slot for slot in self.all_slots() if slot.admitted]

    def context(self, model: LocalModel, trained: int | None) -> int:
        """Return the tokens of a model's context: those that it has, or is going to have at most."""
        slot = self.slots.get(model.path)
        info = slot.process.info if slot is not None and slot.process is not None else None
        most = self._most_context(model)
        return info.context if info else min(trained or most, most)

    def release(self, model: LocalModel, keep_alive_s: float = 0.0) -> bool:
        """Let an engine end so many seconds after its last request; return whether there is one."""
        slot = self.slots.get(model.path) or self._elsewhere(model)
        if slot is not None:
            slot.keep_for(keep_alive_s)
        return slot is not None

    async def close(self) -> None:
        """End all engines; later requests get an error."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
        reason = "is gone: the server is shutting down"
        await asyncio.gather(*(self.unload(slot, reason) for slot in self.all_slots()))

    @property
    def is_closed(self) -> bool:
        """Whether the engines end, or have ended."""
        return self._closed

    @property
    def num_saving(self) -> int:
        """The number of conversations that engines still have to save, while they end."""
        return sum(slot.process.num_saving for slot in self.all_slots() if slot.process is not None)

    def kill(self) -> None:
        """End the processes at once, also while they save conversations. Call it after `close` has begun."""
        for slot in self.all_slots():
            if slot.process is not None:
                slot.process.kill()

    async def unload(self, slot: EngineSlot, reason: str = UNLOADED) -> None:
        """End an engine, also if the caller is cancelled; requests that use it get an error with the reason."""
        await asyncio.shield(self._ending(slot, reason))

    def _ending(self, slot: EngineSlot, reason: str) -> asyncio.Task[None]:
        if slot not in self._endings:
            self._drain(slot)
            self._endings[slot] = asyncio.create_task(self._end(slot, reason))
        return self._endings[slot]

    async def _end(self, slot: EngineSlot, reason: str) -> None:
        try:
            if not self._closed:
                await self.before_unload(slot)
            await slot.stop(reason)
        finally:
            self._leaving.discard(slot)
            del self._endings[slot]
            self._changed()

    def _drain(self, slot: EngineSlot) -> None:
        """Give an engine no more requests; it ends after those that it has."""
        if self.slots.get(slot.model.path) is slot:
            del self.slots[slot.model.path]
        self._leaving.add(slot)
        slot.is_leaving = True

    def _slot(self, model: LocalModel) -> EngineSlot:
        if self._closed:
            raise EngineError("the server is shutting down")
        slot = self.slots.get(model.path)
        if slot is None:
            own = self._keep_alive(model)
            slot = self.slots[model.path] = EngineSlot(
                model,
                self._launch,
                self.memory.admit,
                self._changed,
                keep_alive_s=self._idle_timeout_s if own is None else own,
                pinned=own == math.inf,
            )
        return slot

    def _elsewhere(self, model: LocalModel) -> EngineSlot | None:
        """Return the slot that a model had before it was pulled again, which gives it another path.

        Of files of one's own, two may have one name.
        """
        if model.path in self.slots or model.place not in PULLED:
            return None
        named = (slot for slot in self.slots.values() if slot.model.name == model.name)
        return next((slot for slot in named if slot.model.place == model.place), None)

    async def _follow(self, slot: EngineSlot, model: LocalModel) -> None:
        """Let an engine go on at its model's new path; one of other bytes ends, and the next is kept as long."""
        is_same = await asyncio.to_thread(model.has_bytes_of, slot.model)
        if self.slots.get(slot.model.path) is not slot or model.path in self.slots:
            return  # it ends, or another request was faster
        if is_same:
            self.slots[model.path] = self.slots.pop(slot.model.path)
            slot.model = model
            return
        log.info("%s was pulled again: it is loaded again", model.name)
        self._drain(slot)
        after = self._slot(model)
        after.keep_alive_s, after.pinned = slot.keep_alive_s, slot.pinned
        slot.pinned = False  # its memory is counted on for the next one
        self._changed()

    def _changed(self) -> None:
        self.memory.changed()
        self._news.set()

    async def _keep(self) -> None:
        """Unload engines whose time is over, and those that get no more requests when the last one has ended."""
        while True:
            self._news.clear()
            for slot in [slot for slot in self.all_slots() if self._is_over(slot)]:
                if slot.state != "failed":
                    log.info("%s was not used for %.0f s: unloaded", slot.model.name, slot.idle_s)
                self._ending(slot, UNLOADED)
            next_s = min((slot.expires_in_s for slot in self.slots.values()), default=math.inf)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(next_s) else max(next_s, TICK_S)):
                    await self._news.wait()

    def _is_over(self, slot: EngineSlot) -> bool:
        if slot.leases or slot in self._endings:
            return False
        got_no_memory = slot.state == "failed" and isinstance(slot.error, StillLoadingError)
        return slot.is_leaving or got_no_memory or slot.expires_in_s <= 0


async def _do_nothing(_: EngineSlot) -> None: ...
