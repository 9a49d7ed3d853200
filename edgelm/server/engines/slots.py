"""The engine process of one model in a front: started on demand, restarted after a crash, ended when the table says so.

Owns its states: waiting for memory, starting, ready, failed, stopping; restarts and their pauses; the requests that
use it or wait for it. Does not decide whether there is memory, nor when it ends: memory.py and table.py do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

from edgelm.base.errors import EdgeLMError, EngineError, GpuLoadError, StillLoadingError
from edgelm.base.workers.messages import Footprint, Ready
from edgelm.library.scan import LocalModel
from edgelm.server.engines.process import EngineProcess, until_frozen

State = Literal["waiting", "starting", "ready", "stopping", "failed"]
Launch = Callable[[LocalModel, Footprint | None], Awaitable[EngineProcess]]

# Pause before a restart, by the number of failures since the last answer.
PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
EXIT_LIMIT_S = 5.0  # from a broken connection to the end of the process
FAILED_S = 600.0  # a failure is shown this long
BLOCKED_S = 10.0  # Retry-After while there is no memory
MAX_RESTARTS = len(PAUSES_S) - 1  # after that only a request starts it again

WAIT_HINT = "try again, or omit the header Prefer: wait=SECONDS"
COMING = ("waiting", "starting")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of main memory, and of GPUs with memory of their own."""

    ram: int = 0
    gpu: int = 0

    @classmethod
    def of(cls, footprint: Footprint, nbytes: int = 0) -> Self:
        """Return what is promised to an engine: what it was predicted to take, `nbytes` where that is more."""
        most = max(nbytes, footprint.promise_bytes)
        return cls(gpu=most) if footprint.device == "cuda" else cls(most, footprint.offloaded_bytes)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.ram + other.ram, self.gpu + other.gpu)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.ram - other.ram, self.gpu - other.gpu)

    def lack(self, need: Bytes) -> Bytes:
        """Return what is missing of a need. Where nothing of a kind is needed, nothing of it has to be free."""
        pairs = (need.ram, self.ram), (need.gpu, self.gpu)
        return Bytes(*(max(0, wanted - max(free, 0)) for wanted, free in pairs))

    def holds(self, need: Bytes) -> bool:
        return self.lack(need) == NOTHING


NOTHING = Bytes()


class EngineSlot:
    """The engine of one model. Create it inside the event loop; it starts the engine at once.

    `admit` waits until there is memory for it, and `changed` is called when memory may have become free.
    """

    def __init__(
        self,
        model: LocalModel,
        launch: Launch,
        admit: Callable[[EngineSlot], Awaitable[None]],
        changed: Callable[[], None] = lambda: None,
        *,
        keep_alive_s: float = math.inf,
        pinned: bool = False,
    ) -> None:
        self.model = model
        self.state: State = "starting"
        self.process: EngineProcess | None = None
        self.error: EdgeLMError | None = None  # why it failed, or why it last ended
        self.leases = 0  # requests that use the engine or wait for it
        self.num_loads = 0  # how often an engine of it was ready
        self.num_restarts = 0  # after a crash
        self.keep_alive_s = keep_alive_s  # it stays loaded this long without a request
        self.pinned = pinned  # never unloaded to make room
        self.footprint: Footprint | None = None  # predicted; None: not known yet
        self.asked = NOTHING  # more memory than this would lead to another prediction
        self.admitted = False  # whether it has an engine, or memory was promised to it
        self.promised = NOTHING
        self.blocker = ""  # what it waits for, while it waits for memory
        self.is_leaving = False  # it gets no more requests
        self._launch = launch
        self._admit = admit
        self._changed = changed
        self._num_failures = 0  # since the last answer
        self._used = self._began = self.asked_at = self.now()
        self._retry_at = 0.0
        self._settled = asyncio.Event()  # not coming
        self._num_waiting = 0  # of the leases: in `ready`
        self._unused = asyncio.Event()  # every lease waits: the engine answers nobody
        self._unused.set()
        self._in_use = asyncio.Event()  # the contrary
        self.silent_s = 0.0  # how long its process has given no sign of life while requests use it
        self._outdated: EngineProcess | None = None  # was ended because its model's file changed
        self._begin()

    @property
    def idle_s(self) -> float:
        return 0.0 if self.leases else self.now() - self._used

    @property
    def is_idle(self) -> bool:
        """Whether the engine is loaded and no request uses it."""
        return self.state == "ready" and not self.leases

    @property
    def expires_in_s(self) -> float:
        """Seconds until it is unloaded if no request comes; infinity: never, or it is in use."""
        if self.leases or self.state in (*COMING, "stopping"):
            return math.inf
        return max(0.0, (FAILED_S if self.state == "failed" else self.keep_alive_s) - self.idle_s)

    @property
    def progress(self) -> float | None:
        if self.state == "ready":
            return 1.0
        if self.state != "starting" or self.process is None or self.process.exited:
            return None
        return self.process.progress

    @contextlib.contextmanager
    def lease(self, keep_alive_s: float | None = None) -> Iterator[None]:
        """Keep the engine loaded while the block runs, and then for so many seconds; infinity pins it."""
        if keep_alive_s is not None:
            self.keep_for(keep_alive_s)
        self.leases += 1
        self.asked_at = self.now()
        try:
            yield
        finally:
            self.leases -= 1
            self._note_running()
            self._used = self.now()
            self._changed()

    def keep_for(self, keep_alive_s: float) -> None:
        """Keep the engine loaded for so many seconds after its last request; infinity pins it."""
        self.keep_alive_s, self.pinned = keep_alive_s, math.isinf(keep_alive_s)
        self._changed()

    def wait_for(self, blocker: str) -> None:
        """Note what keeps the memory that the engine waits for."""
        self.state, self.blocker = "waiting", blocker

    def answered(self) -> None:
        """Note an answer of the engine: its next failure counts as the first one."""
        self._num_failures = 0

    async def ready(self, wait_s: float) -> EngineProcess:
        """Return the engine, starting it if necessary.

        Raises StillLoadingError if it is not ready within `wait_s`, and the EdgeLMError of a start that failed.
        """
        if self.state == "failed" and self.now() >= self._retry_at:
            self._begin()
        deadline = asyncio.get_running_loop().time() + wait_s
        self._num_waiting += 1
        self._note_running()
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    process = await self._settled_process()
                if process is None:
                    assert self.error is not None
                    raise self.error
                change = await process.file_change()
                if change == "replaced":  # answers that have begun end with the model that they began with
                    async with asyncio.timeout_at(deadline):
                        await self._unused.wait()
                if change is not None:
                    await self._reload(process)
                elif not process.exited:
                    return process
        except TimeoutError:
            raise self._still_loading() from None
        finally:
            self._num_waiting -= 1
            self._note_running()

    async def stop(self, reason: str) -> None:
        """End the engine; the reason continues a sentence that begins with the model's name."""
        self.state = "stopping"
        self.error = EngineError(f"{self.model.name} {reason}", "try again")
        self._settled.set()
        self._life.cancel()
        await asyncio.wait({self._life})
        if self.process is not None:
            await self.process.close()
        self._free()

    async def exit_error(self, process: EngineProcess) -> EngineError:
        """Return the reason why the connection to an engine broke."""
        if self.state == "stopping":
            assert isinstance(self.error, EngineError)
            return self.error
        try:
            async with asyncio.timeout(EXIT_LIMIT_S):
                return await process.ended()
        except TimeoutError:
            return EngineError("the engine closed the connection", "try again")

    async def unreachable(self, process: EngineProcess) -> EngineError:
        """End an engine that accepts no connection, and return the reason; it is started again."""
        await process.close()
        return await self.exit_error(process)

    async def _reload(self, process: EngineProcess) -> None:
        """End an engine whose model's file changed; another is started at once."""
        if self._outdated is not process:
            log.warning("the file of %s changed: it is loaded again", self.model.name)
        self._outdated = process
        await process.close()

    def _note_running(self) -> None:
        if self.leases <= self._num_waiting:
            self._unused.set()
            self._in_use.clear()
        else:
            self._unused.clear()
            self._in_use.set()

    @property
    def _just_died(self) -> bool:
        """Whether the process has ended and `_live` has not handled it yet."""
        return self.state == "ready" and self.process is not None and self.process.exited

    async def _settled_process(self) -> EngineProcess | None:
        """Wait until the engine is ready; None: it failed."""
        while self.state in COMING or self._just_died:
            if self._just_died:
                self._settled.clear()
            await self._settled.wait()
        assert self.state != "ready" or self.process is not None
        return self.process if self.state == "ready" else None

    def _begin(self) -> None:
        self.process = None
        self._to_starting()
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(self._on_end)

    def _to_starting(self) -> None:
        self.state, self.footprint, self.blocker = "starting", None, ""
        self.silent_s = 0.0
        self._began = self.now()
        self._settled.clear()

    async def _live(self) -> None:
        while True:
            try:
                await self._admit(self)
                self.state, self.blocker, self._began = "starting", "", self.now()
                self.process = await self._launch(self.model, self.footprint)
                await self.process.ready()
            except GpuLoadError as error:  # the next one goes on without CUDA
                log.warning("%s: %s", self.model.name, error)
                await self._give_up(error)
                continue
            except EdgeLMError as error:
                await self._fail(error)
                return
            self.state, self.error = "ready", None
            self.num_loads += 1
            self._note_plan(self.process.info)
            self._used = self.now()
            self._settled.set()
            self._changed()
            process = self.process
            watching = asyncio.create_task(self._end_if_frozen(process))
            try:
                ended = await process.ended()
            finally:
                watching.cancel()
            self._to_starting()
            await self._end_process()
            if process is self._outdated:
                continue
            self.error = ended
            self._num_failures += 1
            if self._num_failures > MAX_RESTARTS:
                await self._fail(ended)
                return
            self.num_restarts += 1
            log.warning("%s: %s", self.model.name, ended)
            await asyncio.sleep(self._pause_s)

    async def _end_if_frozen(self, process: EngineProcess) -> None:
        await until_frozen(process, self._in_use, self._note_silence)
        message = f"the engine process was frozen: no processor time and no answer for {self.silent_s:.0f} s"
        process.kill(EngineError(message, "it is started again; try again"))

    def _note_silence(self, seconds: float) -> None:
        self.silent_s = seconds

    async def _give_up(self, error: GpuLoadError) -> None:
        """End an engine that could not load the model on the GPU, before another is started."""
        self.error = error
        await self._end_process()
        self._to_starting()

    async def _end_process(self) -> None:
        """Wait until a process that failed is gone. It is the slot's until then: `stop` waits for it too."""
        if self.process is not None:
            await self.process.close()
            self.process = None
        self._free()

    def _on_end(self, life: asyncio.Task[None]) -> None:
        """Wake waiting requests if a bug ended the task."""
        if not life.cancelled() and life.exception() is not None:
            self.state, self.error = "failed", EngineError(f"edgelm failed: {life.exception()!r}")
            log.error("%s", self.error, exc_info=life.exception())
            self._free()
            self._settled.set()

    async def _fail(self, error: EdgeLMError) -> None:
        log.warning("%s: %s", self.model.name, error)
        if self.process is not None:
            await self.process.close()
        self.state, self.error = "failed", error
        if not isinstance(error, StillLoadingError):  # there was no memory yet: nothing is wrong with the model
            self._retry_at = self.now() + self._pause_s
            self._num_failures += 1
        self._settled.set()
        self._free()

    def _free(self) -> None:
        """Note that the engine's memory is free again."""
        self.admitted, self.promised = False, NOTHING
        self._changed()

    def _note_plan(self, info: Ready | None) -> None:
        """Take over the engine's own plan, which it made as it began to load."""
        planned = info.footprint if info else None
        promised = self.footprint or (replace(planned, spare_bytes=0) if planned else None)
        if promised is not None:
            self.promised = Bytes.of(promised)
            self.footprint = replace(planned or promised, spare_bytes=promised.spare_bytes)

    @property
    def _pause_s(self) -> float:
        return PAUSES_S[min(self._num_failures, MAX_RESTARTS)]

    def _still_loading(self) -> StillLoadingError:
        name = self.model.name
        if self.state == "ready":
            message = f"{name} is loaded again when the running answers have ended: its file was replaced"
            return StillLoadingError(message, WAIT_HINT)
        if self.blocker:
            return StillLoadingError(f"{name} waits for memory: {self.blocker}", WAIT_HINT, retry_after_s=BLOCKED_S)
        progress = self.progress
        took_s = self.now() - self._began
        share = "" if progress is None else f" ({progress:.0%})"
        again = "" if self.error is None else f" again, because {self.error.message}"
        return StillLoadingError(
            f"{name} is being loaded{again}{share}",
            WAIT_HINT,
            progress=progress,
            retry_after_s=took_s * (1 - progress) / progress if progress else None,
        )

    @staticmethod
    def now() -> float:
        """Return the time of the event loop."""
        return asyncio.get_running_loop().time()
