"""Memory for the engines of a front: how much one takes, who gets it next, and which engine ends for it.

    free for another = free memory - what engines were promised and have not taken yet       (and within --max-memory)

There are two pools, main memory and that of the GPUs; a model of llama.cpp may take some of both. Several GPUs are one
pool, of which our kernels use the freest GPU only.

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
from edgelm.base.machine.gpu import amd_gpus, has_torch, usable_gpus
from edgelm.base.machine.llama_build import has_gpu_backend
from edgelm.base.machine.memory import USABLE, available_memory_bytes, process_memory
from edgelm.base.workers.messages import Footprint, Predict
from edgelm.base.workers.parent import Worker, WorkerDiedError, ask, in_daemon_thread
from edgelm.library.scan import LocalModel
from edgelm.server.engines.process import Launcher
from edgelm.server.engines.slots import NOTHING, Bytes, EngineSlot

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
    gpu_free_bytes: int | None = None  # of all GPUs with memory of their own; None: nothing here tells
    one_gpu_free_bytes: int = 0  # of the freest, which our kernels use


class AnyMachine(Protocol):
    """The machine; a test gives other numbers."""

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        """Return the memory that a model's engine takes, in the best form that fits in `usable_bytes`.

        So much more of the GPUs' memory will be free than is free now; less where `freed_gpu_bytes` is negative.
        Raises EdgeLMError if there is no such form, or if the model cannot be read.
        """

    async def measure(self, pids: Collection[int]) -> Measured: ...


class Machine:
    """This machine, as `AnyMachine`."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._measuring: asyncio.Future[Measured] | None = None  # the latest, which may still run

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        """Ask a worker, which reads the model's header. Raises EdgeLMError, as loading the model would."""
        question = await self._launcher.question(model, usable_bytes, freed_gpu_bytes)
        return await in_daemon_thread(lambda: _ask(model.name, question))

    async def measure(self, pids: Collection[int]) -> Measured:
        """Measure in a thread of its own: where a driver hangs, those of `asyncio.to_thread` serve all others.

        One at a time, also where whoever asked has left: so no more threads wait for the driver.
        """
        while self._measuring and not self._measuring.done():
            await asyncio.wait([self._measuring])
        self._measuring = in_daemon_thread(lambda: measure([*pids]))
        return await asyncio.shield(self._measuring)


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
    # To ask wakes a laptop's GPU, so it is left alone where nothing can use it.
    gpus = [*usable_gpus(), *amd_gpus()] if has_torch() or has_gpu_backend() else []
    free = available_memory_bytes()
    # A GPU without memory of its own shares the processor's.
    gpus_free = [int(USABLE * (gpu.free_bytes if gpu.total_bytes else free)) for gpu in gpus]
    return Measured(
        free_bytes=int(USABLE * free),
        own_bytes={pid: memory.held for pid, memory in processes.items()},
        resident_bytes={pid: memory.resident for pid, memory in processes.items()},
        gpu_free_bytes=sum(gpus_free) if gpus else None,
        one_gpu_free_bytes=max(gpus_free, default=0),
    )


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The room for another engine now, and how much more there is when an engine ends."""

    free: Bytes
    freed_by: dict[EngineSlot, Bytes]
    measured: Measured

    def after_end_of(self, engines: Collection[EngineSlot]) -> Bytes:
        """Return the bytes that are free when these engines have ended."""
        return sum((self.freed_by[engine] for engine in engines), self.free)

    def need(self, footprint: Footprint, nbytes: int = 0) -> Bytes:
        """Return what must be free for an engine: beside its own, what other GPUs have that it cannot use."""
        need, total = Bytes.of(footprint, nbytes), self.measured.gpu_free_bytes
        if total is None:
            return Bytes(need.ram)  # the engine itself sees what its GPU has
        return need + Bytes(gpu=total - self.measured.one_gpu_free_bytes) if footprint.device == "cuda" else need

    def helps(self, engine: EngineSlot, free: Bytes, need: Bytes) -> bool:
        """Return whether the end of an engine brings what is free closer to what is needed."""
        freed, lack = self.freed_by[engine], free.lack(need)
        return bool((freed.ram and lack.ram) or (freed.gpu and lack.gpu))

    def in_order(self, engines: Sequence[EngineSlot], need: Bytes) -> list[EngineSlot]:
        """Return engines in their order, but last those that take most of their memory where none is short."""
        lack = self.free.lack(need)

        def is_aside(engine: EngineSlot) -> bool:
            freed = self.freed_by[engine]
            return not (lack.gpu if freed.gpu > freed.ram else lack.ram)

        return sorted(engines, key=is_aside)


class Memory:
    """Admits engines. `engines` are all that have memory or were promised some; `unload` ends one of them."""

    def __init__(
        self,
        machine: AnyMachine,
        engines: Callable[[], Sequence[EngineSlot]],
        unload: Callable[[EngineSlot], Awaitable[None]],
        drain: Callable[[EngineSlot], None],
        *,
        limit_bytes: int | None = None,
        max_models: int | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._machine = machine
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
        return await self._machine.measure([engine.process.pid for engine in engines if engine.process is not None])

    @staticmethod
    def outstanding(engines: Sequence[EngineSlot], measured: Measured) -> int:
        """Return the bytes that engines were promised and have not taken yet."""
        return sum(max(0, engine.promised.ram - _own_bytes(engine, measured)) for engine in engines)

    @staticmethod
    def gpu_free(engines: Sequence[EngineSlot], measured: Measured) -> int | None:
        """Return what is free of the GPUs less what loading engines were promised; None: nothing here tells.

        What a process has of a GPU is not measured, so a promise counts until its engine is loaded.
        """
        if measured.gpu_free_bytes is None:
            return None
        promised = sum(engine.promised.gpu for engine in engines if engine.state == "starting")
        return max(0, measured.gpu_free_bytes - promised)

    async def free_memory(self, engines: Sequence[EngineSlot]) -> FreeMemory:
        """Return the room that is left beside these engines."""
        for engine in engines:
            if engine.footprint is None:
                with contextlib.suppress(EdgeLMError):  # its load fails for the same reason
                    footprint = await self._machine.predict(engine.model, None)
                    if engine.admitted and engine.footprint is None:
                        self._promise(engine, footprint)
        measured = await self.measure(engines)
        pids = {engine: engine.process.pid for engine in engines if engine.process is not None}
        freed_by, limited = dict[EngineSlot, Bytes](), self.limit_bytes
        for engine in engines:
            pid, promised = pids.get(engine), engine.promised
            if engine.footprint is not None and engine.footprint.device == "cuda":  # its process is not counted
                freed_by[engine] = promised
                continue
            freed = max(promised.ram, _own_bytes(engine, measured))
            if limited is not None:
                freed = max(promised.ram, measured.resident_bytes.get(pid, 0) if pid is not None else 0)
                limited -= freed
            freed_by[engine] = Bytes(freed, promised.gpu)
        free = measured.free_bytes - self.outstanding(engines, measured)
        gpu_free = self.gpu_free(engines, measured) or 0
        return FreeMemory(Bytes(free if limited is None else min(free, limited), gpu_free), freed_by, measured)

    async def _admit_first(self, slot: EngineSlot, *, drains: bool) -> str:
        """Admit the first of the queue if there is memory, or can be; return what it waits for otherwise."""
        while True:
            engines = [engine for engine in self._engines() if engine is not slot]
            if not engines and self.limit_bytes is None:  # the engine itself checks whether it fits
                slot.footprint, slot.admitted = None, True
                return ""
            left = await self.free_memory(engines)
            may_end = _may_end(engines)
            footprint = await self._footprint(slot, left, may_end, engines)
            nbytes = self._nbytes(footprint, left, may_end, engines)
            need = left.need(footprint, nbytes)
            surplus = self._surplus(engines)
            if left.free.holds(need) and surplus <= 0:
                self._promise(slot, footprint, nbytes)
                return ""
            loading = [engine for engine in engines if engine.state == "starting"]
            if surplus <= 0 and (left.free + _freed_once_loaded(loading)).holds(need):
                return _reason(loading, "being loaded")  # then it takes less
            idle = _idle(may_end)
            useful = (engine for engine in left.in_order(idle, need) if left.helps(engine, left.free, need))
            victim = next(iter(idle), None) if surplus > 0 else next(useful, None)
            if victim is None or len(idle) < surplus or not left.after_end_of(idle).holds(need):
                ending, busy = _ending(may_end), _busy(may_end)
                for engine in _must_end(may_end, left, need, surplus) if drains else ():
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
        left = await self.free_memory(engines)
        may_end = _may_end(engines)
        footprint = await self._footprint(slot, left, may_end, engines)
        nbytes = self._nbytes(footprint, left, may_end, engines)
        if (
            not left.free.holds(left.need(footprint, nbytes))
            or self._surplus(engines) > 0
            or self._queue[0] is not first
        ):
            return _came_first(first)
        need_of_first = left.need(first.footprint, self._nbytes(first.footprint, left, may_end, ()))
        loading = [engine for engine in engines if engine.state == "starting"]
        if (left.free + _freed_once_loaded(loading)).holds(need_of_first):
            return _came_first(first)  # it waits for nothing but the end of a load
        ends = _must_end(may_end, left, need_of_first, 0)
        rest = left.after_end_of(ends) - Bytes.of(footprint, nbytes)
        if not rest.holds(need_of_first):  # --max-models needs no such look: an engine ends, and one goes ahead
            return _came_first(first)
        self._promise(slot, footprint, nbytes)
        return ""

    def _surplus(self, engines: Sequence[EngineSlot]) -> int:
        """Return how many engines must end before another one begins, by --max-models."""
        return len(engines) + 1 - (self._max_models or len(engines) + 1)

    async def _footprint(
        self, slot: EngineSlot, left: FreeMemory, may_end: Sequence[EngineSlot], engines: Sequence[EngineSlot]
    ) -> Footprint:
        """Predict a slot's engine in the memory that there is without those that may end. Raises EdgeLMError."""
        pinned = [engine.model.name for engine in engines if engine not in may_end]
        if self._max_models is not None and len(pinned) >= self._max_models:
            message = f"{slot.model.name} cannot be loaded: --max-models is {self._max_models}, and {_names(pinned)}"
            raise ModelError(f"{message} {_kept_for_ever(pinned)}", f"edgelm unload {pinned[0]}")
        after = left.after_end_of(may_end)
        usable = after.ram if self.limit_bytes is None else int(after.ram / (1 + SPARE))
        known = slot.footprint
        if known is not None and _still_holds(known, Bytes(usable, after.gpu), slot.asked, left):
            return known
        try:
            footprint = await self._machine.predict(slot.model, usable, after.gpu - (left.measured.gpu_free_bytes or 0))
        except ModelError as error:
            if not pinned:
                raise
            raise ModelError(f"{error.message}, as {_names(pinned)} {_kept_for_ever(pinned)}", error.hint) from None
        if self.limit_bytes is not None:
            footprint = replace(footprint, spare_bytes=footprint.spare_bytes or int(footprint.total_bytes * SPARE))
        else:
            footprint = replace(footprint, spare_bytes=0)
        slot.footprint, slot.asked = footprint, Bytes(int(1.1 * usable), int(1.1 * after.gpu))
        return footprint

    def _nbytes(
        self, footprint: Footprint, left: FreeMemory, may_end: Sequence[EngineSlot], engines: Sequence[EngineSlot]
    ) -> int:
        """Return the bytes that an engine needs to begin: beside others that load, also its pages of the file."""
        loads_alone = not any(engine.state == "starting" for engine in engines)
        if self.limit_bytes is None and loads_alone:
            return footprint.promise_bytes
        most = left.after_end_of(may_end)
        return max(
            footprint.promise_bytes,
            min(footprint.load_peak_bytes, most.gpu if footprint.device == "cuda" else most.ram),
        )

    def _promise(self, slot: EngineSlot, footprint: Footprint, nbytes: int = 0) -> None:
        slot.footprint, slot.admitted = footprint, True
        slot.promised = Bytes.of(footprint, nbytes)

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


def _must_end(may_end: Sequence[EngineSlot], left: FreeMemory, need: Bytes, surplus: int) -> Sequence[EngineSlot]:
    """Return the engines whose end makes room for another: no more than it needs, those that end soonest first."""
    ends = _ending(may_end)
    loading = [engine for engine in may_end if engine.state == "starting" and engine not in ends]
    groups = _idle(may_end), _busy(may_end), loading
    for engine in (engine for group in groups for engine in left.in_order(group, need)):
        free = left.after_end_of(ends)
        if free.holds(need) and len(ends) >= surplus:
            break
        if engine not in ends and (left.helps(engine, free, need) or len(ends) < surplus):
            ends.append(engine)
    return ends


def _own_bytes(engine: EngineSlot, measured: Measured) -> int:
    """Return the bytes of an engine that the system cannot drop; where they are not measured, all promised ones."""
    unknown = engine.promised.ram if engine.state != "starting" else 0
    return measured.own_bytes.get(engine.process.pid, unknown) if engine.process is not None else 0


def _still_holds(known: Footprint, usable: Bytes, asked: Bytes, left: FreeMemory) -> bool:
    """Return whether a prediction is still the best form of an engine, in the memory that there is."""
    if known.ram_bytes > usable.ram or not usable.holds(Bytes(gpu=left.need(known).gpu)):
        return False
    if known.device == "cuda":
        return known.is_preferred or usable.gpu <= asked.gpu
    is_best = known.is_preferred or usable.ram <= asked.ram
    return is_best and (known.device == "cpu" or usable.gpu <= asked.gpu)  # more layers may fit


def _freed_once_loaded(loading: Sequence[EngineSlot]) -> Bytes:
    """Return the bytes that engines give back when they are loaded."""
    return sum((engine.promised - Bytes.of(engine.footprint) for engine in loading if engine.footprint), NOTHING)


def _came_first(first: EngineSlot) -> str:
    return f"{first.model.name} came first"


def _reason(engines: Sequence[EngineSlot], doing: str) -> str:
    names = [engine.model.name for engine in engines]
    return f"{_names(names)} {'is' if len(names) == 1 else 'are'} {doing}"


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _kept_for_ever(names: Sequence[str]) -> str:
    return "is kept for ever" if len(names) == 1 else "are kept for ever"
