"""Memory for the engines of a front: how much one takes, who gets it next, and which engine ends for it.

    free for another = free memory - what engines were promised and have not taken yet       (and within --max-memory)

Engines are admitted in the order in which they came. Idle ones end for the first of the queue, the least recently used
first; busy ones are waited for, and one that is asked all the time gets no more requests until the first one is
admitted. Pinned ones stay.

While the first waits for engines that must end, a later one goes ahead if it fits into memory that is free now, and if
the first will fit beside it when those engines have ended. So their memory is kept for the first, and those that go
ahead cannot delay it by more than the time in which they load. No engine ends for one that goes ahead.

A worker predicts, and the system's counters are read: `Machine`. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgelm.base.errors import EdgeLMError, ModelError, StillLoadingError
from edgelm.base.machine.gpu import has_torch, usable_gpus
from edgelm.base.machine.memory import USABLE, available_memory_bytes, process_memory
from edgelm.base.workers.messages import Footprint, Predict
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask, in_daemon_thread
from edgelm.library.scan import LocalModel
from edgelm.server.engines.process import Launcher
from edgelm.server.engines.slots import EngineSlot

WORKER = "edgelm.backends.probe_worker"
PREDICT_LIMIT_S = 120.0
ROOM_LIMIT_S = 300.0  # an engine waits this long for memory; then its requests get a 503
RETRY_S = 30.0  # their Retry-After
DRAIN_S = 5.0  # it waits this long for busy engines to be idle; then the least recently used get no more requests
UNWANTED_S = 60.0  # it waits this long when no request needs it
POLL_S = 1.0
SPARE = 1 / 9  # of the predicted bytes, for idle conversations, under --max-memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory of this moment."""

    free_bytes: int  # of the machine, less a reserve
    own_bytes: dict[int, int] = field(default_factory=dict)  # process: bytes that the system cannot drop
    resident_bytes: dict[int, int] = field(default_factory=dict)  # process: all bytes, shared pages in equal parts
    gpu_free_bytes: int = 0


class Host(Protocol):
    """The machine; a test gives other numbers."""

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        """Return the memory that a model's engine takes, in the best form that fits in `usable_bytes`.

        Raises EdgeLMError if there is no such form, or if the model cannot be read.
        """

    async def measure(self, pids: Collection[int]) -> Measured: ...


class Machine:
    """This machine: a `Host`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        """Ask a worker, which reads the model's header. Raises EdgeLMError, as loading the model would."""
        question = await self._launcher.question(model, usable_bytes, freed_gpu_bytes)
        return await in_daemon_thread(lambda: _ask(model.name, question))

    async def measure(self, pids: Collection[int]) -> Measured:
        return await asyncio.to_thread(measure, [*pids])


def _ask(name: str, question: Predict) -> Footprint:
    try:
        worker = Worker(WORKER, replies=(Footprint,), errors=(ModelError,))
        footprint: Footprint = ask(worker, question, PREDICT_LIMIT_S)
    except TimeoutError:
        message = f"the memory of {name} could not be predicted within {PREDICT_LIMIT_S:.0f} s"
        raise EdgeLMError(message, "see `edgelm plan`") from None
    except WorkerDiedError as error:
        raise EdgeLMError(f"the memory of {name} could not be predicted: {error}", "see `edgelm plan`") from None
    return footprint


def measure(pids: Collection[int]) -> Measured:
    """Return the memory that is free less a reserve, and that of engine processes with all that they started."""
    processes = {pid: memory for pid in pids if (memory := process_memory(pid)) is not None}
    gpus, free = usable_gpus() if has_torch() else [], available_memory_bytes()
    return Measured(
        free_bytes=int(USABLE * free),
        own_bytes={pid: memory.held for pid, memory in processes.items()},
        resident_bytes={pid: memory.resident for pid, memory in processes.items()},
        # A GPU without memory of its own shares the processor's.
        gpu_free_bytes=int(USABLE * max((gpu.free_bytes if gpu.total_bytes else free for gpu in gpus), default=0)),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """The room for another engine now, and how much more there is when an engine ends."""

    free: dict[str, int]  # kind of memory: bytes
    freed_by: dict[EngineSlot, int]

    def after_end_of(self, engines: Collection[EngineSlot], pool: str) -> int:
        """Return the bytes that are free when these engines have ended."""
        return self.free[pool] + sum(self.freed_by[engine] for engine in engines if pool_of(engine.footprint) == pool)


class Memory:
    """Admits engines. `engines` are all that have memory or were promised some; `unload` ends one of them."""

    def __init__(
        self,
        host: Host,
        engines: Callable[[], Sequence[EngineSlot]],
        unload: Callable[[EngineSlot], Awaitable[None]],
        drain: Callable[[EngineSlot], None],
        *,
        limit_bytes: int | None = None,
        max_models: int | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._host = host
        self._engines = engines
        self._unload = unload
        self._drain = drain
        self._max_models = max_models
        self._queue: list[EngineSlot] = []  # first come, first served
        self._looking = asyncio.Lock()  # one decision at a time: it takes time to measure, and to end an engine
        self._news = asyncio.Event()

    def changed(self) -> None:
        """Look again: memory may have become free."""
        self._news.set()
        self._news = asyncio.Event()

    async def admit(self, slot: EngineSlot) -> None:
        """Wait until there is memory for a slot's engine, and promise it.

        Raises StillLoadingError if there is none within ROOM_LIMIT_S, EdgeLMError if the model can never fit.
        """
        if self._queue:
            slot.wait_for(_came_first(self._queue[0]))
        try:
            async with asyncio.timeout(ROOM_LIMIT_S):
                while self._is_twin_alive(slot):  # outside of the queue, since it may answer for minutes
                    if slot.is_leaving:  # it crashed: the other process is the later one
                        raise StillLoadingError(f"{slot.model.name} has ended to make room", "try again")
                    slot.wait_for("its last process is ending")
                    await _change(self._news)
                self._queue.append(slot)
                try:
                    await self._wait_in_queue(slot)
                finally:
                    self._queue.remove(slot)
                    self.changed()
        except TimeoutError:
            reason = slot.blocker or "the memory is in use"
            message = f"{slot.model.name} got no memory within {ROOM_LIMIT_S:.0f} s: {reason}"
            raise StillLoadingError(message, "try again later", retry_after_s=RETRY_S) from None

    async def _wait_in_queue(self, slot: EngineSlot) -> None:
        first_since = None  # when it became the first of the queue
        while True:
            async with self._looking:
                news = self._news
                if self._queue[0] is not slot:
                    reason = await self._admit_ahead(slot)
                else:
                    first_since = slot.now() if first_since is None else first_since
                    reason = await self._admit_first(slot, drains=slot.now() - first_since >= DRAIN_S)
            if not reason:
                return
            slot.wait_for(reason)
            if slot.idle_s > UNWANTED_S and not slot.pinned:
                raise StillLoadingError(f"{slot.model.name} is not loaded: nobody waits for it", "try again")
            await _change(news)

    async def measure(self, engines: Sequence[EngineSlot]) -> Measured:
        """Return the memory of the machine and of these engines now."""
        return await self._host.measure([engine.process.pid for engine in engines if engine.process is not None])

    @staticmethod
    def outstanding(engines: Sequence[EngineSlot], measured: Measured) -> int:
        """Return the bytes that engines were promised and have not taken yet."""
        return sum(
            max(0, engine.promised_bytes - _own_bytes(engine, measured)) for engine in engines if _is_in_ram(engine)
        )

    async def room(self, engines: Sequence[EngineSlot]) -> Room:
        """Return the room that is left beside these engines."""
        for engine in engines:
            if engine.footprint is None:
                with contextlib.suppress(EdgeLMError):  # its load fails for the same reason
                    footprint = await self._host.predict(engine.model, None)
                    if engine.admitted and engine.footprint is None:
                        self._promise(engine, footprint)
        measured = await self.measure(engines)
        pids = {engine: engine.process.pid for engine in engines if engine.process is not None}
        free, gpu_free, freed_by = measured.free_bytes, measured.gpu_free_bytes, {}
        limited = self.limit_bytes
        for engine in engines:
            pid, promised = pids.get(engine), engine.promised_bytes
            if pool_of(engine.footprint) == "gpu":
                freed_by[engine] = promised
                gpu_free -= promised if engine.state == "starting" else 0
                continue
            own_bytes = _own_bytes(engine, measured)
            free -= max(0, promised - own_bytes)
            freed_by[engine] = max(promised, own_bytes)
            if limited is not None:
                resident_bytes = measured.resident_bytes.get(pid, 0) if pid is not None else 0
                freed_by[engine] = max(promised, resident_bytes)
                limited -= freed_by[engine]
        return Room({"ram": free if limited is None else min(free, limited), "gpu": gpu_free}, freed_by)

    async def _admit_first(self, slot: EngineSlot, *, drains: bool) -> str:
        """Admit the first of the queue if there is memory, or can be; return what it waits for otherwise."""
        while True:
            engines = [engine for engine in self._engines() if engine is not slot]
            if not engines and self.limit_bytes is None:  # the engine itself checks whether it fits
                slot.footprint, slot.admitted = None, True
                return ""
            room = await self.room(engines)
            may_end = _may_end(engines)
            footprint = await self._footprint(slot, room, may_end, engines)
            pool = pool_of(footprint)
            need = self._need(footprint, room.after_end_of(may_end, pool), engines)
            surplus = self._surplus(engines)
            if room.free[pool] >= need and surplus <= 0:
                self._promise(slot, footprint, need)
                return ""
            loading = [engine for engine in engines if engine.state == "starting"]
            if surplus <= 0 and room.free[pool] + _freed_once_loaded(loading, pool) >= need:
                return _reason(loading, "being loaded")  # then it takes less
            idle = _idle(may_end)
            victim = next((engine for engine in idle if surplus > 0 or pool_of(engine.footprint) == pool), None)
            if victim is None or len(idle) < surplus or room.after_end_of(idle, pool) < need:
                ending, busy = _ending(may_end), _busy(may_end)
                for engine in _must_end(may_end, room, pool, need, surplus) if drains else ():
                    if engine in busy:
                        self._drain(engine)
                return _reason(busy or ending or engines, "in use")
            log.info("%s is unloaded to make room for %s", victim.model.name, slot.model.name)
            await self._unload(victim)

    async def _admit_ahead(self, slot: EngineSlot) -> str:
        """Admit a later one of the queue if the first does not need the memory; return why not otherwise."""
        first = self._queue[0]
        engines = [engine for engine in self._engines() if engine is not slot]
        if first.footprint is None or not engines:  # the first has not looked yet
            return _came_first(first)
        room = await self.room(engines)
        may_end = _may_end(engines)
        footprint = await self._footprint(slot, room, may_end, engines)
        pool, pool_of_first = pool_of(footprint), pool_of(first.footprint)
        need = self._need(footprint, room.after_end_of(may_end, pool), engines)
        if room.free[pool] < need or self._surplus(engines) > 0 or self._queue[0] is not first:
            return _came_first(first)
        need_of_first = self._need(first.footprint, room.after_end_of(may_end, pool_of_first), ())
        loading = [engine for engine in engines if engine.state == "starting"]
        if room.free[pool_of_first] + _freed_once_loaded(loading, pool_of_first) >= need_of_first:
            return _came_first(first)  # it waits for nothing but the end of a load
        ends = _must_end(may_end, room, pool_of_first, need_of_first, 0)
        left = room.after_end_of(ends, pool_of_first) - (need if pool == pool_of_first else 0)
        if left < need_of_first:  # --max-models needs no such look: an engine ends, and one goes ahead
            return _came_first(first)
        self._promise(slot, footprint, need)
        return ""

    def _surplus(self, engines: Sequence[EngineSlot]) -> int:
        """Return how many engines must end before another one begins, by --max-models."""
        return len(engines) + 1 - (self._max_models or len(engines) + 1)

    async def _footprint(
        self, slot: EngineSlot, room: Room, may_end: Sequence[EngineSlot], engines: Sequence[EngineSlot]
    ) -> Footprint:
        """Predict a slot's engine in the memory that there is without those that may end. Raises EdgeLMError."""
        pinned = [engine.model.name for engine in engines if engine not in may_end]
        if self._max_models is not None and len(pinned) >= self._max_models:
            message = f"{slot.model.name} cannot be loaded: --max-models is {self._max_models}, and {_names(pinned)}"
            raise ModelError(f"{message} {_kept_for_ever(pinned)}", f"edgelm unload {pinned[0]}")
        usable = room.after_end_of(may_end, "ram")
        if self.limit_bytes is not None:
            usable = int(usable / (1 + SPARE))
        known = slot.footprint
        if known is not None and known.total_bytes <= usable and (known.is_preferred or usable <= slot.asked_bytes):
            return known
        try:
            gpu = sum(room.freed_by[engine] for engine in may_end if pool_of(engine.footprint) == "gpu")
            footprint = await self._host.predict(slot.model, usable, gpu)
        except ModelError as error:
            if not pinned:
                raise
            raise ModelError(f"{error.message}, as {_names(pinned)} {_kept_for_ever(pinned)}", error.hint) from None
        if self.limit_bytes is not None:
            footprint = replace(footprint, spare_bytes=footprint.spare_bytes or int(footprint.total_bytes * SPARE))
        else:
            footprint = replace(footprint, spare_bytes=0)
        slot.footprint, slot.asked_bytes = footprint, int(1.1 * usable)
        return footprint

    def _need(self, footprint: Footprint, most: int, engines: Sequence[EngineSlot]) -> int:
        """Return the bytes that an engine needs to begin: beside others that load, also its pages of the file."""
        loads_alone = not any(engine.state == "starting" for engine in engines)
        if self.limit_bytes is None and loads_alone:
            return footprint.promise_bytes
        return max(footprint.promise_bytes, min(footprint.load_peak_bytes, most))

    def _promise(self, slot: EngineSlot, footprint: Footprint, nbytes: int = 0) -> None:
        slot.footprint, slot.admitted = footprint, True
        slot.promised_bytes = max(nbytes, footprint.promise_bytes)

    def _is_twin_alive(self, slot: EngineSlot) -> bool:
        """Return whether an earlier process of the same model has not ended yet, or waits for memory after a crash."""
        others = [engine for engine in (*self._engines(), *self._queue) if engine is not slot]
        return any(engine.model.path == slot.model.path for engine in others)


async def _change(news: asyncio.Event) -> None:
    """Wait for news, or for a while: other programs free memory without telling us."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(POLL_S):
            await news.wait()


def _may_end(engines: Sequence[EngineSlot]) -> list[EngineSlot]:
    return [engine for engine in engines if not engine.pinned or engine.state == "stopping"]


def _ending(engines: Sequence[EngineSlot]) -> list[EngineSlot]:
    return [engine for engine in engines if engine.state == "stopping" or engine.is_leaving]


def _idle(engines: Sequence[EngineSlot]) -> list[EngineSlot]:
    """Return the engines that may end at once, the least recently used first."""
    return sorted((engine for engine in engines if engine.is_idle), key=lambda engine: -engine.idle_s)


def _busy(engines: Sequence[EngineSlot]) -> list[EngineSlot]:
    """Return the engines that must be waited for, the least recently used first."""
    ending = _ending(engines)
    busy = [engine for engine in engines if engine.state == "ready" and not engine.is_idle and engine not in ending]
    return sorted(busy, key=lambda engine: engine.asked_at)


def _must_end(may_end: Sequence[EngineSlot], room: Room, pool: str, need: int, surplus: int) -> Sequence[EngineSlot]:
    """Return the engines whose end makes room for another: no more than it needs, those that end soonest first."""
    ends = _ending(may_end)
    loading = [engine for engine in may_end if engine.state == "starting" and engine not in ends]
    for engine in [*_idle(may_end), *_busy(may_end), *loading]:
        if room.after_end_of(ends, pool) >= need and len(ends) >= surplus:
            break
        if engine not in ends and (pool_of(engine.footprint) == pool or len(ends) < surplus):
            ends.append(engine)
    return ends


def _own_bytes(engine: EngineSlot, measured: Measured) -> int:
    """Return the bytes of an engine that the system cannot drop; where they are not measured, all promised ones."""
    unknown = engine.promised_bytes if engine.state != "starting" else 0
    return measured.own_bytes.get(engine.process.pid, unknown) if engine.process is not None else 0


def _is_in_ram(engine: EngineSlot) -> bool:
    return pool_of(engine.footprint) == "ram"


def pool_of(footprint: Footprint | None) -> str:
    """Return the kind of memory that an engine takes."""
    return "gpu" if footprint is not None and footprint.device == "cuda" else "ram"


def _freed_once_loaded(loading: Sequence[EngineSlot], pool: str) -> int:
    """Return the bytes that engines give back when they are loaded."""
    own = [engine for engine in loading if pool_of(engine.footprint) == pool]
    return sum(engine.promised_bytes - engine.footprint.promise_bytes for engine in own if engine.footprint)


def _came_first(first: EngineSlot) -> str:
    return f"{first.model.name} came first"


def _reason(engines: Sequence[EngineSlot], doing: str) -> str:
    names = [engine.model.name for engine in engines]
    return f"{_names(names)} {'is' if len(names) == 1 else 'are'} {doing}"


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _kept_for_ever(names: Sequence[str]) -> str:
    return "is kept for ever" if len(names) == 1 else "are kept for ever"
