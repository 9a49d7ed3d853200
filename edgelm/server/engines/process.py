"""The front's side of one engine process: start it, follow its loading, speak HTTP to it, see it freeze, end it.

Owns the process and its socket, and the memory of GPUs that failed. Knows nothing of restarts and requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import httpx2

from edgelm.backends.choice import may_go_without_cuda
from edgelm.base.config import DEFAULT_CONTEXT, Config, Settings
from edgelm.base.errors import DeviceError, EdgeLMError, EngineError, GpuLoadError
from edgelm.base.machine import facts as machine
from edgelm.base.workers.exit_reason import ModelFiles, exit_reason
from edgelm.base.workers.messages import Footprint, Loading, Note, Predict, Ready, ServeJob, Status
from edgelm.base.workers.parent import Worker, in_daemon_thread
from edgelm.library.adapters import adapter_files
from edgelm.library.local import find_draft_model, model_config
from edgelm.library.scan import LocalModel, note_use
from edgelm.server.listener import private_folder
from edgelm.server.transport import Transport

WORKER = "edgelm.server.engine_process.worker"
ERRORS = DeviceError, GpuLoadError
CONNECT_LIMIT_S = 10.0
BEGIN_AFTER_S, BEGUN_S = 0.5, 120.0  # when a process for the first load is started, and for how long it waits
ANSWER_S = 1.0  # for a sign of life
KEPT_CONNECTIONS = 32  # without a request, to one engine
KEPT_S = 5.0  # far below KEEP_ALIVE_S, after which the engine closes them

FROZEN_S = 20.0  # without a sign of life
TICK_S = 2.0
LEAST_CPU_S = 0.001  # of a tick
LEAST_SLEEP_S = 0.5  # of the machine, by its clocks
STILL = "ST"  # states of proc(5): sleeping, and stopped by a signal

REMEMBERED_S = 600.0  # of a GPU's failures
MAX_CRASHES = 2  # of an engine, within REMEMBERED_S

log = logging.getLogger(__name__)

Change = Literal["rewritten", "replaced"]


class Launcher:
    """Starts engine processes, with the settings of their models."""

    def __init__(self, config: Config, sockets: Path | None, *, verbose: bool = False) -> None:
        self._config = config
        self._places = config.places
        self._sockets = sockets
        self._verbose = verbose
        self._started = 0
        self._gpu_failures = GpuFailures()
        self._gpu_bytes = WeakKeyDictionary[EngineProcess, int]()  # as they were predicted
        self._facts: asyncio.Future[machine.MachineFacts] | None = None
        self._begun: Worker | None = None  # a process without a model

    async def __call__(self, model: LocalModel, footprint: Footprint | None) -> EngineProcess:
        """Start a process that loads a model, in the memory of its prediction.

        Raises EdgeLMError if llama.cpp does not work here, or if there is no such draft model.
        """
        path, settings = model.path, self._settings_of(model)
        facts = await self._machine_facts()
        facts.require_working()
        draft = await self._draft_of(settings)
        self._started += 1
        cuda_problem = self._cuda_problem_of(path, settings)
        if cuda_problem:
            log.warning("%s: CUDA is not used: %s", model.name, cuda_problem)
        job = ServeJob(
            model=path,
            settings=settings,
            repack=facts.repack,
            memory_bytes=self._memory_of(footprint),
            gpu_bytes=footprint.offloaded_bytes if footprint and footprint.device == "gpu" else None,
            prefixes=self._places.prefixes,
            drafts=True,
            key=secrets.token_urlsafe(32),
            socket=self._socket(),
            held_gpu_bytes=sum(held for process, held in self._gpu_bytes.items() if not process.exited),
            cuda_problem=cuda_problem,
        )
        worker, self._begun = self._begun, None
        process = EngineProcess(
            self._worker(facts, f"{path.name}: ") if worker is None or worker.exited else worker,
            job,
            draft,
            adapter_files(settings.lora),
            note_use=lambda: note_use(self._places.data, path),
            note_failure=lambda error: self._gpu_failures.note(path, error),
        )
        self._gpu_bytes[process] = footprint.gpu_bytes if footprint else 0
        return process

    def _socket(self) -> Path | None:
        """Return the path of the next engine's socket; None: it listens at a port, since there is no folder for one."""
        if self._sockets is None:
            return None
        try:
            private_folder(self._sockets)  # a cleaner of temporary folders may have removed it
        except EdgeLMError as error:  # a session's folder is gone after its log-out, and only root can make it
            log.warning("an engine listens at a port of this machine alone: %s", error)
            return None
        return self._sockets / f"{self._started}.sock"

    def _worker(self, facts: machine.MachineFacts, name: str = "") -> Worker:
        flags, echo = (["-v"], name) if self._verbose else ([], None)
        replies = (Loading, Note, Ready, Status)
        return Worker(WORKER, *flags, replies=replies, errors=ERRORS, environment=facts.environment, echo=echo)

    async def begin(self) -> None:
        """Start a process for the first load, which imports before it has a model; end it where none comes soon.

        It imports for as long as a small model needs to load and answer.
        """
        await asyncio.sleep(BEGIN_AFTER_S)  # a front that ends at once, or is asked at once, needs none
        with contextlib.suppress(EdgeLMError):  # reported by the load
            facts = await self._machine_facts()
            facts.require_working()
            if self._started == 0 and not self._verbose:  # its log is named after the model
                self._begun = self._worker(facts)
                await asyncio.sleep(BEGUN_S)
                self.end_begun()

    def end_begun(self) -> None:
        """End the process that waits for a load, if there is one."""
        if self._begun is not None:
            self._begun.kill()
            self._begun = None

    def most_context(self, model: LocalModel) -> int:
        """Return the most tokens of context that the settings of a model allow."""
        return self._settings_of(model).ctx or DEFAULT_CONTEXT

    async def question(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int) -> Predict:
        """Return the question for the memory of a model's process. Raises EdgeLMError, as a start would."""
        facts = await self._machine_facts()
        facts.require_working()
        settings = self._settings_of(model)
        return Predict(
            model.path,
            settings,
            await self._draft_of(settings),
            facts.repack,
            usable_bytes,
            self._config.settings.max_memory is not None,
            freed_gpu_bytes,
            self._cuda_problem_of(model.path, settings),
        )

    def _cuda_problem_of(self, model: Path, settings: Settings) -> str:
        return self._gpu_failures.problem(model) if may_go_without_cuda(settings) else ""

    def _settings_of(self, model: LocalModel) -> Settings:
        config = model_config(model, self._config)
        by_flag = config.sources["ctx"].startswith("--")  # of `edgelm serve`: for every model
        return replace(config.settings, ctx_is_default=config.settings.ctx_is_default or by_flag).without_keys

    async def _draft_of(self, settings: Settings) -> Path | None:
        """Return the model that drafts beside another; None: there is none. Raises ModelError."""
        draft = await asyncio.to_thread(find_draft_model, settings, self._places.hub)
        return draft.path if draft else None

    def _memory_of(self, footprint: Footprint | None) -> int | None:
        """Return the memory that a process may take; None: as much as it finds free."""
        if footprint is None or (self._config.settings.max_memory is None and footprint.is_preferred):
            return None
        return footprint.promise_bytes

    async def _machine_facts(self) -> machine.MachineFacts:
        """Measure the machine once; the first time on a machine takes seconds."""
        if self._facts is None:
            self._facts = in_daemon_thread(lambda: machine.facts(self._places.cache, notify=lambda _: None))
        try:
            return await asyncio.shield(self._facts)
        except EdgeLMError:
            self._facts = None
            raise


class EngineProcess:
    """The worker that serves one model. Made inside the event loop."""

    client: httpx2.AsyncClient  # once it is ready

    def __init__(
        self,
        worker: Worker,
        job: ServeJob,
        draft: Path | None = None,
        adapters: Sequence[Path] = (),
        *,
        note_use: Callable[[], None] = lambda: None,
        note_failure: Callable[[EdgeLMError], None] = lambda _: None,
    ) -> None:
        self.pid = worker.pid
        self.progress: float | None = None  # of loading, 0 to 1
        self.doing = ""  # beside reading weights: checking or compiling kernels
        self.info: Ready | None = None  # once it is ready
        self._worker = worker
        self._job = job
        self._files = ModelFiles(job.model, *([draft] if draft else []))
        self._adapters = ModelFiles(*adapters)  # read whole while loading: writing into one breaks no answer
        self.cuda_problem = job.cuda_problem  # why it does not use CUDA, which failed before
        self._killed_for: EngineError | None = None
        self._note_use = note_use
        self._note_failure = note_failure
        self._ending: asyncio.Task[EngineError] | None = None
        self._transport: Transport | None = None  # once it is ready
        worker.send(job)
        self._starting = asyncio.create_task(self._start())
        self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may never be awaited

    @property
    def exited(self) -> bool:
        """Whether the process is gone, or has said that it can do nothing more: the kernel may keep it for a while."""
        return self._worker.exited or (self._ending is not None and self._ending.done())

    @property
    def num_saving(self) -> int:
        """The number of conversations that it still has to save, while it ends."""
        return 0 if self.exited else self._worker.num_saving

    async def file_change(self) -> Change | None:
        """Return how the model's files changed since it loaded them.

        Rewritten: its answers would be wrong from now on. Replaced: they are right, of the old model.
        """
        return await asyncio.to_thread(self._file_change)

    def _file_change(self) -> Change | None:
        if self._files.rewritten():
            return "rewritten"
        return "replaced" if self._files.replaced() or self._adapters.replaced() else None

    async def ready(self) -> None:
        """Wait until it answers. Raises EdgeLMError with its own error, or with how it died."""
        await asyncio.shield(self._starting)

    async def ended(self) -> EngineError:
        """Wait for its end and return the reason."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> EngineError:
        """Wait for the error that the process ends with, or for its end."""
        try:
            while (reply := await self._worker.areceive()) is not None:
                if isinstance(reply, Note):
                    log.error("%s: %s", self._files.name, reply.text)
        except EdgeLMError as error:
            if self.info is None or self.info.engine == "torch":  # llama.cpp's GPU is not what is left out then
                self._note_failure(error)
            return error if isinstance(error, EngineError) else EngineError(error.message, error.hint)
        end = await self._worker.aexit()
        if self._killed_for is not None:
            return self._killed_for
        return await asyncio.to_thread(exit_reason, end, self._files)

    async def close(self) -> None:
        """End it, and wait until it is gone: up to SAVING_S more while it saves conversations."""
        if self.info is not None:
            self._note_use()
        await self._worker.aclose()
        self._starting.cancel()
        if self._transport is not None:  # not the client: a late request shall fail as a broken connection
            await self._transport.aclose()
        if self._job.socket is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._job.socket)  # noqa: PTH108 - the event loop must not wait for pathlib's checks

    def kill(self, reason: EngineError | None = None) -> None:
        """End it at once, for a reason that its clients are told."""
        self._killed_for = reason
        self._worker.kill()

    def processor_s(self) -> float | None:
        """Return its processor time; None: that is not known, or it has a reason to use none."""
        return processor_s(self.pid)

    async def answers(self) -> bool:
        """Return whether it answers at once."""
        with contextlib.suppress(httpx2.HTTPError):
            await self.client.get("/stats", timeout=ANSWER_S)
            return True
        return False

    async def _start(self) -> None:
        """Follow the loading. Raises EdgeLMError with the worker's own error, or with how it died."""
        noticed = set[str]()  # kinds of status: a log has the first line of each, which tells how many are to come
        try:
            while isinstance(reply := await self._worker.areceive(), Loading | Note | Status):
                self.doing = reply.text if isinstance(reply, Status) else ""
                if isinstance(reply, Loading):
                    self.progress = reply.share
                elif isinstance(reply, Note) or (kind := reply.text.partition(":")[0]) not in noticed:
                    log.warning("%s: %s", self._files.name, reply.text)
                    noticed |= {kind} if isinstance(reply, Status) else set()
        except EdgeLMError as error:
            self._note_failure(error)
            raise
        if reply is None:
            raise await self.ended()
        assert isinstance(reply, Ready)
        self.info = reply
        self.progress = 1.0
        self.client = self._connect(reply.port)
        self._note_use()

    def _connect(self, port: int | None) -> httpx2.AsyncClient:
        """Return a client that keeps some connections for later requests.

        A request that comes just as the engine ends fails like any other whose engine died.
        """
        uds = None if self._job.socket is None else str(self._job.socket)
        self._transport = Transport(KEPT_CONNECTIONS, KEPT_S, uds=uds)
        return httpx2.AsyncClient(
            transport=self._transport,
            base_url=f"http://127.0.0.1:{port}" if port else "http://localhost",
            headers={"authorization": f"Bearer {self._job.key}"},
            timeout=httpx2.Timeout(None, connect=CONNECT_LIMIT_S),
            trust_env=False,
        )


async def until_frozen(process: EngineProcess, in_use: asyncio.Event, note: Callable[[float], None]) -> None:
    """Return when a process is frozen: requests use it, it gets no processor time, and it answers nothing.

    To wait for a disk or a processor, or to be held by a debugger, is no such sign. Time is counted in the front's own
    ticks, and begins again when the machine or this process slept. `note` gets the seconds without a sign of life at
    each tick in use. An engine in which a step hangs answers: `engine/watchdog.py` in its process ends it.
    """
    now = asyncio.get_running_loop().time
    silent_s, used_s, slept_s = 0.0, process.processor_s(), suspended_s()
    while silent_s < FROZEN_S:
        await in_use.wait()
        began = now()
        await asyncio.sleep(TICK_S)
        took_s = now() - began
        before_s, used_s = used_s, process.processor_s()
        slept_before_s, slept_s = slept_s, suspended_s()
        stands_still = used_s is not None and before_s is not None and used_s - before_s < LEAST_CPU_S
        away = took_s > 2 * TICK_S or slept_s - slept_before_s > LEAST_SLEEP_S
        if away or not stands_still or not in_use.is_set() or await process.answers():
            silent_s = 0.0
        else:
            silent_s += now() - began
        note(silent_s)


def suspended_s() -> float:
    """Return how long the machine has been suspended since it was started; 0 where the system does not tell."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if boottime is None else time.clock_gettime(boottime) - time.clock_gettime(time.CLOCK_MONOTONIC)


def processor_s(pid: int) -> float | None:
    """Return the processor time of a process that stands still; None for others, and where /proc does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return time.clock_gettime((~pid << 3) | 2) if state in STILL else None  # as clock_getcpuclockid(3)
    except (OSError, IndexError):
        return None


class GpuFailures:
    """The failures of each model's engines, so that `--engine auto` goes on without CUDA.

    A model that CUDA could not load, or whose engine CUDA ended twice within some minutes, is loaded without it. After
    a while without a failure, CUDA is tried again when the model is next loaded.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._crashes: dict[Path, list[float]] = {}  # when
        self._problems: dict[Path, tuple[float, str]] = {}  # since when, and why CUDA is not used

    def note(self, model: Path, error: EdgeLMError) -> None:
        """Note how an engine failed to load, or ended."""
        now = self._now()
        if isinstance(error, GpuLoadError):
            self._problems[model] = now, error.message
        elif isinstance(error, DeviceError):
            recent = [when for when in self._crashes.get(model, []) if now - when < REMEMBERED_S]
            self._crashes[model] = [*recent, now]
            if len(self._crashes[model]) >= MAX_CRASHES:
                times = f"{len(self._crashes[model])} times within {REMEMBERED_S / 60:.0f} minutes"
                self._problems[model] = now, f"it failed {times}, last: {error.message}"

    def problem(self, model: Path) -> str:
        """Return why CUDA is not to be used for a model; empty: it may be."""
        since, problem = self._problems.get(model, (0.0, ""))
        return problem if problem and self._now() - since < REMEMBERED_S else ""
