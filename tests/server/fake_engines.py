"""Engine processes and a machine that do what a test says, for the table of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

import httpx2

from edgelm.base.errors import EdgeLMError, EngineError, ModelError
from edgelm.base.workers.messages import Footprint, Ready
from edgelm.library.scan import LocalModel
from edgelm.server.engines.memory import Measured
from edgelm.server.engines.process import Change

LONG_S = 20.0


def model_called(name: str) -> LocalModel:
    return LocalModel(name, Path(f"/{name}.gguf"))


def footprint(
    total: int, *, peak: int | None = None, preferred: bool = True, device: str = "cpu", offloaded: int = 0
) -> Footprint:
    return Footprint(
        device=device,
        context=512,
        kv="f16",
        weights_bytes=total,
        kv_bytes=0,
        workspace_bytes=0,
        draft_bytes=0,
        total_bytes=total,
        load_peak_bytes=peak or total,
        spare_bytes=0,
        is_preferred=preferred,
        offloaded_bytes=offloaded,
    )


class FakeHost:
    """A machine with so many bytes; a model takes what `sizes` says, or 1."""

    def __init__(self, total: int = 1 << 40, sizes: dict[str, int] | None = None) -> None:
        self.total = total
        self.sizes = sizes or {}
        self.taken: dict[int, int] = {}  # process: bytes
        self.predicted: list[str] = []

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        self.predicted.append(model.name)
        size = self.sizes.get(model.name, 1)
        if usable_bytes is not None and size > usable_bytes:
            raise ModelError(f"{model.name} needs {size}, {usable_bytes} are free")
        return footprint(size)

    async def measure(self, pids: Collection[int]) -> Measured:
        held = {pid: self.taken[pid] for pid in pids if pid in self.taken}
        return Measured(self.total - sum(self.taken.values()), held, held)


class FakeProcess:
    """An engine process that does what it is told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.progress: float | None = None
        self.doing = ""
        self.info: Ready | None = None
        self.cuda_problem = ""
        self.client = httpx2.AsyncClient(verify=False)  # it makes no connection, and certificates take 20 ms to read
        self.closed = False
        self.num_saving = 0
        self.killed = False
        self.crashed = False  # by the test
        self.used_s: float | None = None  # processor time
        self.is_alive = True  # it answers
        self.on_end: Callable[[], None] = lambda: None
        self.change: Change | None = None  # of the model's file
        self.looked = asyncio.Event()  # at the model's file
        self.looked.set()
        self.closing = asyncio.Event()  # it was asked to end
        self.may_close = asyncio.Event()
        self.may_close.set()
        self._readiness: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    @property
    def exited(self) -> bool:
        return self.end.done()

    async def file_change(self) -> Change | None:
        await self.looked.wait()
        return self.change

    async def ready(self) -> None:
        await asyncio.shield(self._readiness)
        self.info = Ready("fake", "llama", "cpu", 512)

    async def ended(self) -> EngineError:
        return await asyncio.shield(self.end)

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()
        self.closed = True
        self.die("closed")

    def kill(self, reason: EngineError | None = None) -> None:
        self.killed = True
        self.may_close.set()
        if reason is not None:
            self.die(str(reason))

    def processor_s(self) -> float | None:
        return self.used_s

    async def answers(self) -> bool:
        return self.is_alive

    def load(self) -> None:
        self._readiness.set_result(None)

    def fail(self, error: EdgeLMError) -> None:
        self._readiness.set_exception(error)

    def die(self, how: str = "died") -> None:
        if not self.end.done():
            self.end.set_result(EngineError(how))
            self.on_end()
        if not self._readiness.done():
            self._readiness.set_exception(EngineError(how))
            self._readiness.exception()


class Launches:
    """Where a table gets its engines from."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.models: list[str] = []
        self._more = asyncio.Event()

    async def __call__(self, model: LocalModel, _: Footprint | None) -> FakeProcess:
        self.processes.append(FakeProcess(len(self.processes) + 1))
        self.models.append(model.name)
        self._more.set()
        return self.processes[-1]

    def most_context(self, _: LocalModel) -> int:
        return 4096

    async def begin(self) -> None:
        """Begin no process before a load."""

    def end_begun(self) -> None: ...

    async def number(self, count: int) -> FakeProcess:
        """Return the count-th engine once it is started."""
        async with asyncio.timeout(LONG_S):
            while len(self.processes) < count:
                self._more.clear()
                await self._more.wait()
        return self.processes[count - 1]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not true():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
