"""One engine process as the front sees it: start it, follow its events, speak HTTP to it, end it for certain.

Owns the process and its socket. Knows nothing of why it is started, of restarts, and of what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx2

from edgelm.config import Places, Settings
from edgelm.errors import EdgeLMError, EngineError
from edgelm.executors import machine
from edgelm.library.usage import note_use
from edgelm.server.death import engine_death
from edgelm.server.listener import private_folder
from edgelm.server.model_files import ModelFiles

GRACE_S = 2.0  # between the closing of its standard input and SIGKILL
CONNECT_LIMIT_S = 10.0
LAST_LINES = 20
LONGEST_LINE = 65_536  # of which more is kept

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself when it is ready."""

    name: str
    engine: str
    device: str
    context: int


class EngineLink(Protocol):
    """What the table needs of an engine process."""

    pid: int
    progress: float | None  # of loading, 0 to 1
    info: EngineInfo | None  # once it is ready
    client: httpx2.AsyncClient

    @property
    def exited(self) -> bool: ...

    async def outdated(self) -> bool:
        """Tell whether somebody wrote into the model's file: what it computes now is nonsense."""

    async def ready(self) -> None:
        """Wait until it answers. Raises EdgeLMError with what it says, or how it died."""

    async def ended(self) -> EngineError:
        """Wait for its end, and return how it came."""

    async def close(self) -> None:
        """End it, and wait until it is gone."""


def owner_of(api_key: str | None) -> str:
    """Return what stands for those who have a key: what they wrote serves nobody else. Empty: this machine's user."""
    return hashlib.sha256(api_key.encode()).hexdigest()[:32] if api_key else ""


class Launcher:
    """Starts engine processes, all with the same settings."""

    def __init__(self, settings: Settings, places: Places, sockets: Path | None, *, verbose: bool = False) -> None:
        self._settings = replace(settings, api_key=None)
        self._owner = owner_of(settings.api_key)
        self._places = places
        self._sockets = sockets
        self._verbose = verbose
        self._started = 0
        self._facts: asyncio.Future[machine.MachineFacts] | None = None

    async def __call__(self, path: Path) -> EngineLink:
        """Start a process that loads a model. Raises EdgeLMError where llama.cpp does not work here."""
        facts = await self._machine_facts()
        facts.require_working()
        self._started += 1
        where = {"key": secrets.token_urlsafe(32)}
        if self._sockets is not None:
            private_folder(self._sockets)  # a cleaner of temporary folders may have taken it
            where["socket"] = str(self._sockets / f"{self._started}.sock")
        job = {
            "job": "serve",
            "model": str(path),
            "settings": asdict(self._settings),
            "repack": facts.repack,
            "prefixes": str(self._places.prefixes),
            "drafts": True,
            "owner": self._owner,
            "verbose": self._verbose,
            **where,
        }
        link = EngineProcess(job, verbose=self._verbose, note_use=lambda: note_use(self._places.data, path))
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: link,
                *(sys.executable, "-P", "-m", "edgelm.server.engine_process"),  # -P: nothing of the current folder
                env=os.environ | machine.child_environment(facts),
                start_new_session=True,  # Ctrl-C in the terminal reaches the front alone, which then ends the engines
            )
        except OSError as error:
            raise EngineError(f"the engine process cannot be started: {error.strerror}") from None
        return link

    async def _machine_facts(self) -> machine.MachineFacts:
        """Measure the machine once; the first time ever this takes seconds."""
        if self._facts is None:
            self._facts = _in_daemon_thread(lambda: machine.facts(self._places.cache, notify=lambda _: None))
        try:
            return await asyncio.shield(self._facts)
        except EdgeLMError:
            self._facts = None
            raise


class EngineProcess(asyncio.SubprocessProtocol):
    """An engine process. The loop that starts it calls back with what it prints and when it ends."""

    def __init__(self, job: dict[str, Any], *, verbose: bool, note_use: Callable[[], None] = lambda: None) -> None:
        self.pid = 0
        self.progress: float | None = None
        self.info: EngineInfo | None = None
        self._job = job
        self._files = ModelFiles(Path(job["model"]))
        self._verbose = verbose
        self._note_use = note_use
        self._transport: asyncio.SubprocessTransport
        self._lines = {1: b"", 2: b""}  # begun on standard output and standard error
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._errors: list[EdgeLMError] = []  # what it says that hinders it
        self._settled = asyncio.Event()  # it is ready, or says why not, or has ended
        self._exited = asyncio.Event()
        self._silent = asyncio.Event()  # both its outputs are closed

    @property
    def exited(self) -> bool:
        return self._exited.is_set()

    async def outdated(self) -> bool:
        return await asyncio.to_thread(self._files.rewritten)

    async def ready(self) -> None:
        await self._settled.wait()
        if self.info is None and not self._errors:
            self._errors.append(await self.ended())  # behind what it said last
        if self._errors:
            raise self._errors[0]

    async def ended(self) -> EngineError:
        await self._exited.wait()
        with contextlib.suppress(TimeoutError):  # a process of its own may still hold the pipes
            await asyncio.wait_for(self._silent.wait(), GRACE_S)
        code = self._transport.get_returncode()
        assert code is not None
        return await asyncio.to_thread(engine_death, code, self._last_lines, self._files)

    async def close(self) -> None:
        if self.info is not None:
            self._note_use()
        self._stdin().close()
        try:
            await asyncio.wait_for(self._exited.wait(), GRACE_S)
        except TimeoutError:
            self._transport.kill()
            with contextlib.suppress(TimeoutError):  # the kernel may hold it: we do not
                await asyncio.wait_for(self._exited.wait(), GRACE_S)
        self._transport.close()
        if (path := self._job.get("socket")) is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 - no path object is needed, and none is wanted in the loop

    # -- called by the loop ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()
        self._stdin().write(json.dumps(self._job).encode() + b"\n")

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._lines[fd] + data).split(b"\n")
        self._lines[fd] = rest[-LONGEST_LINE:]
        for line in lines:
            self._take_event(line) if fd == 1 else self._take_log(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._take_log(self._lines.pop(fd, b""))
        if not self._lines:
            self._silent.set()

    def process_exited(self) -> None:
        self._exited.set()
        self._settled.set()

    # --------------------------------------------------------------------------------------------------------------

    def _stdin(self) -> asyncio.WriteTransport:
        pipe = self._transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        return pipe

    def _take_event(self, line: bytes) -> None:
        event = json.loads(line)
        if event["event"] == "progress":
            self.progress = event["share"]
            return
        if event["event"] == "error":
            self._errors.append(EdgeLMError(event["message"], event["hint"]))
        elif event["event"] == "ready":
            self.info = EngineInfo(event["name"], event["engine"], event["device"], event["context"])
            self.progress = 1.0
            self.client = self._connect(event["port"])
            self._note_use()
        self._settled.set()

    def _take_log(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip()
        if line:
            self._last_lines.append(line)
            if self._verbose:
                print(f"{self.pid}: {line}", file=sys.stderr)  # noqa: T201 - the log that -v asks for

    def _connect(self, port: int | None) -> httpx2.AsyncClient:
        """Return a client without a pool: a connection ends with its request, and there is nothing to close.

        A request that comes just as the engine ends fails like any other whose engine died.
        """
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx2.AsyncHTTPTransport(verify=False, trust_env=False, limits=limits, uds=self._job.get("socket"))
        return httpx2.AsyncClient(
            transport=transport,
            base_url=f"http://127.0.0.1:{port}" if port else "http://localhost",
            headers={"authorization": f"Bearer {self._job['key']}"},
            timeout=httpx2.Timeout(None, connect=CONNECT_LIMIT_S),
            trust_env=False,
        )


def _in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work`, which may raise EdgeLMError, in a thread that does not hold up the end of this process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(deliver: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if done.done() else deliver(what))

    def run() -> None:
        try:
            result = work()
        except EdgeLMError as error:
            tell(done.set_exception, error)
        except BaseException as error:  # a bug: its trace is shown here, and who waits does not wait for ever
            tell(done.set_exception, error)
            raise
        else:
            tell(done.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return done
