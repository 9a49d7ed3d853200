"""The front's side of an engine process, on programs that stand in for one and behave badly."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from edgelm.base.config import Settings, load_config
from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.base.machine import facts as machine
from edgelm.base.workers import parent
from edgelm.base.workers.messages import Loading, Note, Ready, ServeJob, Status
from edgelm.base.workers.parent import Worker
from edgelm.library.scan import LocalModel
from edgelm.server.engine_process import worker
from edgelm.server.engines import process as engine_process
from edgelm.server.engines.process import EngineProcess, Launcher
from tests.server.fake_engines import footprint

READY = "{'event': 'ready', 'name': 'fake', 'engine': 'llama', 'device': 'cpu', 'context': 512, 'port': None}"
PRELUDE = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
def emit(event): print(json.dumps(event), flush=True)
"""
LIMIT_S = 30


async def start(program: str, tmp_path: Path) -> EngineProcess:
    command = (sys.executable, "-c", PRELUDE + program)
    job = ServeJob(model=tmp_path / "m.gguf", settings=Settings(), key="k", socket=tmp_path / "s")
    return EngineProcess(Worker("", replies=(Loading, Note, Ready, Status), command=command), job)


async def test_progress_then_ready(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        process = await start(f"emit({{'event': 'loading', 'share': 0.5}}); emit({READY}); sys.stdin.read()", tmp_path)
        await process.ready()
        assert process.info
        assert (process.info.name, process.info.context, process.progress) == ("fake", 512, 1.0)
        await process.close()
        assert (await process.ended()).message == "the engine process ended with code 0"


async def test_notes_are_logged_and_the_first_line_of_each_kind_of_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That one tells how much there is to do."""
    lines = [("note", "it is slow"), ("status", "checking: 1 of 40, a"), ("note", "and old")]
    lines += [("status", "checking: 2 of 40, b"), ("status", "compiling: 0 of 27"), ("status", "compiling: 1 of 27")]
    program = "".join(f"emit({{'event': '{event}', 'text': '{text}'}}); " for event, text in lines)
    async with asyncio.timeout(LIMIT_S):
        process = await start(f"{program}emit({READY}); sys.stdin.read()", tmp_path)
        await process.ready()
        await process.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"m.gguf: {text}" for text in ("it is slow", "checking: 1 of 40, a", "and old", "compiling: 0 of 27")
    ]


async def test_a_request_to_an_engine_that_was_closed_is_a_broken_connection(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        process = await start(f"emit({READY}); sys.stdin.read()", tmp_path)
        await process.ready()
        await process.close()
        with pytest.raises(httpx2.TransportError):
            await process.client.get("/stats")


async def test_what_it_says_of_its_failure(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        process = await start("emit({'event': 'failed', 'message': 'too large', 'hint': 'shrink it'})", tmp_path)
        with pytest.raises(EdgeLMError, match="too large; shrink it"):
            await process.ready()
        await process.close()


@pytest.mark.parametrize("engine", ["torch", "llama"])
async def test_what_it_says_before_its_end_counts_though_the_process_stays(tmp_path: Path, engine: str) -> None:
    """The kernel may keep a process whose driver hangs: nobody waits for it. Only torch's is a failure of CUDA."""
    async with asyncio.timeout(LIMIT_S):
        failed = "{'event': 'failed', 'kind': 'DeviceError', 'message': 'the GPU hangs', 'hint': 'try again'}"
        process = await start(
            f"emit({READY.replace('llama', engine)}); sys.stdin.readline(); emit({failed})\nwhile True: time.sleep(1)",
            tmp_path,
        )
        noted: list[EdgeLMError] = []
        process._note_failure = noted.append
        await process.ready()
        ended = [asyncio.create_task(process.ended()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not process.exited
        process._worker.send_line(b"\n")
        assert [str(await end) for end in ended] == ["the GPU hangs; try again"] * 2
        assert process.exited
        assert [str(error) for error in noted] == ["the GPU hangs; try again"] * (engine == "torch")
        process.kill()
        await process.close()


async def test_how_it_died(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        process = await start("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
        with pytest.raises(EngineError, match="killed by SIGKILL; memory"):
            await process.ready()
        await process.close()


async def test_a_machine_where_llama_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def facts(cache: Path, *, notify: object) -> machine.MachineFacts:
        asked.append(cache)
        if len(asked) == 1:
            raise EngineError("cannot make a temporary folder")
        return machine.MachineFacts(canary="failed", reason="crashes on this machine")

    monkeypatch.setattr(machine, "facts", facts)
    places = {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}
    launch = Launcher(load_config({}, places), None)
    model = LocalModel("x", tmp_path / "x.gguf")
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match="temporary folder"):
            await launch(model, None)
        for _ in range(2):
            with pytest.raises(EngineError, match="crashes on this machine"):
                await launch(model, None)
    assert asked == [tmp_path, tmp_path], "what failed is tried again, what was found is kept"


async def test_an_engine_starts_without_the_kernels_that_are_wrong_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str | None]] = []

    class NoWorker:
        def __init__(self, *_: object, environment: dict[str, str | None], **__: object) -> None:
            environments.append(environment)

    found = machine.MachineFacts(canary="no_amx", reason="crashes")
    monkeypatch.setattr(machine, "facts", lambda *_, **__: found)
    monkeypatch.setattr(engine_process, "Worker", NoWorker)
    monkeypatch.setattr(engine_process, "EngineProcess", Mock)
    launch = Launcher(load_config({}, {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}), None)
    await launch(LocalModel("x", tmp_path / "x.gguf"), None)
    assert environments[0].items() >= machine.NO_AMX.items()


async def test_an_engine_is_told_what_those_beside_it_have_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    class Process:
        exited = False

        def __init__(self, _: object, job: ServeJob, *__: object, **___: object) -> None:
            held.append(job.held_gpu_bytes)

    monkeypatch.setattr(machine, "facts", lambda *_, **__: machine.MachineFacts(canary="ok"))
    monkeypatch.setattr(engine_process, "Worker", Mock())
    monkeypatch.setattr(engine_process, "EngineProcess", Process)
    launch = Launcher(load_config({}, {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}), None)
    model = LocalModel("x", tmp_path / "x.gguf")
    first: Any = await launch(model, footprint(7, device="cuda"))
    _on_processor = await launch(model, footprint(5))
    await launch(model, None)
    first.exited = True
    await launch(model, None)
    assert held == [0, 7, 7, 0]


async def test_an_engine_has_a_port_where_its_socket_has_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's runtime folder is gone after its log-out, and only root can make it again."""
    sockets: list[Path | None] = []
    session = tmp_path / "session"

    def start(_: object, job: ServeJob, *__: object, **___: object) -> Mock:
        sockets.append(job.socket)
        return Mock()

    monkeypatch.setattr(machine, "facts", lambda *_, **__: machine.MachineFacts(canary="ok"))
    monkeypatch.setattr(engine_process, "Worker", Mock())
    monkeypatch.setattr(engine_process, "EngineProcess", start)
    places = {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}
    launch = Launcher(load_config({}, places), session / "engines")
    model = LocalModel("x", tmp_path / "x.gguf")
    session.write_text("here nobody can make a folder")
    await launch(model, None)
    session.unlink()  # the user logged in again
    await launch(model, None)
    assert sockets == [None, session / "engines" / "2.sock"]


class Waiting:
    """A process without a model."""

    def __init__(self, *_: object, **__: object) -> None:
        self.exited = False

    def kill(self) -> None:
        self.exited = True


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Waiting]:
    """The processes that loads have got, of launchers that begin one without delay."""
    launched: list[Waiting] = []
    monkeypatch.setattr(machine, "facts", lambda *_, **__: machine.MachineFacts(canary="ok"))
    monkeypatch.setattr(engine_process, "Worker", Waiting)
    monkeypatch.setattr(engine_process, "EngineProcess", lambda worker, *_, **__: launched.append(worker) or Mock())
    monkeypatch.setattr(engine_process, "BEGIN_AFTER_S", 0.0)
    return launched


async def begun(launch: Launcher) -> tuple[asyncio.Task[None], Any]:
    """Let a process for the first load begin; return the task, and the process."""
    beginning = asyncio.create_task(launch.begin())
    for _ in range(10_000):
        if launch._begun is not None:
            break
        await asyncio.sleep(0.001)
    return beginning, launch._begun


async def test_the_first_load_gets_the_process_that_was_begun_before(tmp_path: Path, launched: list[Waiting]) -> None:
    launch = Launcher(load_config({}, {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}), None)
    beginning, process = await begun(launch)
    for _ in range(2):
        await launch(LocalModel("x", tmp_path / "x.gguf"), None)
    assert launched[0] is process
    assert launched[1] is not process
    launch.end_begun()
    assert not process.exited, "it has a model now"
    beginning.cancel()


async def test_a_process_that_no_load_takes_ends(
    tmp_path: Path, launched: list[Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launcher(load_config({}, {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}), None)
    beginning, process = await begun(launch)
    launch.end_begun()  # the front ends
    assert process.exited
    beginning.cancel()
    monkeypatch.setattr(engine_process, "BEGUN_S", 0.0)
    end, ended = launch.end_begun, list[Any]()
    monkeypatch.setattr(launch, "end_begun", lambda: ended.append(launch._begun) or end())
    await launch.begin()
    assert [process.exited for process in ended] == [True]
    await launch(LocalModel("x", tmp_path / "x.gguf"), None)
    assert not launched[0].exited


async def test_a_process_that_died_before_its_load_is_replaced(tmp_path: Path, launched: list[Waiting]) -> None:
    launch = Launcher(load_config({}, {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}), None)
    beginning, process = await begun(launch)
    process.exited = True
    await launch(LocalModel("x", tmp_path / "x.gguf"), None)
    assert [other.exited for other in launched] == [False]
    beginning.cancel()


async def test_no_process_is_begun_behind_a_load(tmp_path: Path, launched: list[Waiting]) -> None:
    launch = Launcher(load_config({}, {"EDGELM_CACHE_DIR": str(tmp_path), "EDGELM_CONFIG_DIR": str(tmp_path)}), None)
    await launch(LocalModel("x", tmp_path / "x.gguf"), None)
    await launch.begin()
    assert launch._begun is None


async def test_the_vocabulary_is_read_for_grammars_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [1, 0, 0, 1, 0, 0, 0]  # open requests
    read: list[int] = []

    class Engine:
        @property
        def num_requests(self) -> int:
            return looks.pop(0)

    async def prepare(_: object) -> None:
        raise EngineError("the template's process does not start")

    monkeypatch.setattr(worker, "QUIET_S", 0.0)
    monkeypatch.setattr(worker, "NUM_QUIET", 3)
    monkeypatch.setattr(worker.gc, "freeze", lambda: None)
    grammars = Mock(prepare=lambda: read.append(len(looks)))
    async with asyncio.timeout(LIMIT_S):
        await worker._warm_up(Mock(prepare=prepare), grammars, Engine())  # type: ignore[arg-type]
    assert read == [0]


async def test_one_that_does_not_leave_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "GRACE_S", 0.1)
    async with asyncio.timeout(LIMIT_S):
        process = await start(f"emit({READY})\nwhile True: time.sleep(1)", tmp_path)
        await process.ready()
        await process.close()
        assert "SIGKILL" in (await process.ended()).message


async def test_a_grandchild_that_keeps_the_pipes_does_not_hold_up_the_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "GRACE_S", 0.1)
    async with asyncio.timeout(LIMIT_S):
        process = await start(f"emit({READY})\nif os.fork(): os._exit(7)\nsys.stdin.read()", tmp_path)
        await process.ready()
        assert "code 7" in (await process.ended()).message
        await process.close()
