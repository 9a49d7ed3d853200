"""The end of a front whose engines save conversations: how long it waits, what it says, and how a user cuts it off."""

from __future__ import annotations

import asyncio
import os
import plistlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.applications import Starlette

from edgelm.base.config import load_config
from edgelm.base.runtime import FrontRecord
from edgelm.base.workers.parent import GRACE_S
from edgelm.base.workers.wire import SAVING_S, Saving, encode
from edgelm.commands import serve as command
from edgelm.commands.launch import server as launch
from edgelm.commands.service.launchd import Launchd
from edgelm.commands.service.system import Definition
from edgelm.commands.service.systemd import SERVICE, Systemd
from edgelm.server import serving as module
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.engines.table import EngineTable
from edgelm.server.listener import bind_tcp
from edgelm.server.remotes.models import Remotes
from edgelm.server.serving import ServeOptions
from edgelm.server.upkeep import Upkeep
from tests.server.fake_engines import LONG_S, FakeProcess, Launches, model_called, until
from tests.server.harness import Front, processes_of, serving
from tests.server.harness import until as wait_until

MODEL = model_called("a")
QUESTION = " the quick brown fox jumps over the lazy dog" * 12  # some hundred tokens of tests.tiny

# In an engine process, a disk that takes SECONDS for a file, in parts.
SLOW_DISK = """
import sys
if "edgelm.server.engine_process.worker" in sys.orig_argv:
    import time
    from edgelm.backends import snapshot_files
    snapshot_files.PIECE = 1000
    write = snapshot_files.atomic_write
    def slowly(path, *parts, on_part):
        def wait():
            time.sleep(SECONDS / len(parts))
            on_part()
        write(path, *parts, on_part=wait)
    snapshot_files.atomic_write = slowly
"""


def test_whoever_waits_for_a_front_gives_its_engines_the_time_to_save(tmp_path: Path) -> None:
    longest_s = SAVING_S + GRACE_S + module.GRACE_S
    assert longest_s < launch.STOP_S
    definition = Definition(("edgelm", "serve"), "127.0.0.1", 1)
    unit = Systemd(tmp_path).files(definition)[tmp_path / SERVICE]
    assert int(unit.partition("TimeoutStopSec=")[2].split()[0]) > longest_s
    assert "KillMode=mixed\n" in unit, "the engines themselves get no signal"
    (agent,) = Launchd(tmp_path, tmp_path / "log").files(definition).values()
    assert plistlib.loads(agent.encode())["ExitTimeOut"] > longest_s


# -- with an engine that a test controls -------------------------------------------------------------------------------


@dataclass
class Served:
    """A front in this process, whose engine ends when the test lets it."""

    process: FakeProcess
    ended: asyncio.Task[int | None]
    reports: list[int] = field(default_factory=list)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], asyncio.Future[Served]]:
    tables: list[EngineTable] = []
    monkeypatch.setattr(module, "front_app", lambda *_: Starlette())
    launches = Launches()
    config = load_config({}, {f"EDGELM_{kind}_DIR": str(tmp_path) for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME")})

    async def started() -> Served:
        reports: list[int] = []
        serving = module._serve(
            config,
            launches,  # type: ignore[arg-type]
            tables.append,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            [bind_tcp("127.0.0.1", 0)],
            None,
            ServeOptions([]),
            lambda: None,
            reports.append,
            Remotes(),
            Upkeep(tmp_path, FrontRecord(os.getpid(), "http://127.0.0.1:1")),
        )
        ended = asyncio.create_task(serving)
        await until(lambda: bool(tables))
        async with tables[0].lease(MODEL) as slot:
            assert isinstance(slot, EngineSlot)
            process = await launches.number(1)
            process.load()
            await slot.ready(LONG_S)
        process.may_close.clear()
        process.num_saving = 2
        return Served(process, ended, reports)

    return lambda: asyncio.ensure_future(started())


async def test_a_line_tells_that_conversations_are_saved_and_the_front_waits(
    start: Callable[[], asyncio.Future[Served]], caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(LONG_S):
        front = await start()
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: "saving" in caplog.text)
        front.process.num_saving = 1
        await until(lambda: 1 in front.reports)
        assert not front.ended.done()
        front.process.may_close.set()
        assert await front.ended == signal.SIGTERM
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["saving 2 conversations… (Ctrl-C again ends at once)"], "once"
    assert not front.process.killed
    assert front.reports[0] == 2


async def test_an_end_that_is_quick_says_nothing(
    start: Callable[[], asyncio.Future[Served]], caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(LONG_S):
        front = await start()
        front.process.may_close.set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await front.ended == signal.SIGTERM
    assert not caplog.records


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_at_once(
    start: Callable[[], asyncio.Future[Served]], number: signal.Signals
) -> None:
    async with asyncio.timeout(LONG_S):
        front = await start()
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: bool(front.reports))
        await asyncio.sleep(module.AGAIN_S)
        assert not front.process.killed
        os.kill(os.getpid(), number)
        assert await front.ended == signal.SIGINT, "the first one says how it ended"
        assert front.process.killed


async def test_a_signal_that_a_wrapper_passes_on_is_no_second_one(
    start: Callable[[], asyncio.Future[Served]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", LONG_S)
    async with asyncio.timeout(LONG_S):
        front = await start()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.02)
        await until(lambda: bool(front.reports))
        assert not front.process.killed
        front.process.may_close.set()
        assert await front.ended == signal.SIGINT


def test_the_front_of_a_chat_tells_the_chat_that_it_saves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chat waits longer for a front that says so (`Worker.close`)."""
    monkeypatch.setattr(command, "serve", lambda _, __, announce, on_saving: on_saving(2))
    for until_stdin_closes in (True, False):
        command.serve_models([], flags={}, until_stdin_closes=until_stdin_closes)
    assert capsys.readouterr().out == encode(Saving(2)).decode()


# -- with real processes -----------------------------------------------------------------------------------------------


@contextmanager
def slow_disk(environment: dict[str, str], folder: Path, seconds: float) -> Iterator[dict[str, str]]:
    """Give an environment in which an engine process writes a file in so many seconds."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"SECONDS = {seconds}\n{SLOW_DISK}", encoding="utf-8")
    yield environment | {"PYTHONPATH": str(folder)}


@pytest.fixture
def alone(own: dict[str, str], cache: Path, tmp_path: Path) -> dict[str, str]:
    """An environment whose conversations are of one test alone."""
    shutil.copytree(cache, tmp_path / "cache", ignore=shutil.ignore_patterns("prefixes"))
    return own | {"EDGELM_CACHE_DIR": str(tmp_path / "cache")}


def cached_tokens(front: Front) -> int:
    usage = front.chat("long", QUESTION).json()["usage"]
    assert usage["prompt_tokens"] > 300
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def test_a_turn_just_before_a_restart_is_cached_after_it(alone: dict[str, str], models: Path, tmp_path: Path) -> None:
    """Also where the disk takes longer than a process without conversations would be given."""
    with slow_disk(alone, tmp_path / "slow", 4.0) as environment:
        with serving(environment, models / "long.gguf", log=tmp_path / "log") as front:
            assert cached_tokens(front) == 0
            began = time.monotonic()
            assert front.end() == 0
            assert time.monotonic() - began > 3
        assert "saving 1 conversation… (Ctrl-C again ends at once)" in (tmp_path / "log").read_text().splitlines()
    with serving(alone, models / "long.gguf", log=tmp_path / "log2") as front:
        assert cached_tokens(front) > 256


def test_an_unloaded_model_saves_its_conversations_while_the_front_answers(
    alone: dict[str, str], models: Path, tmp_path: Path
) -> None:
    with (
        slow_disk(alone, tmp_path / "slow", 4.0) as environment,
        serving(environment, models / "long.gguf", log=tmp_path / "log") as front,
    ):
        assert cached_tokens(front) == 0
        assert front.http.post("/api/generate", json={"model": "long", "keep_alive": 0}).status_code == 200
        assert front.http.get("/health").status_code == 200
        assert cached_tokens(front) > 256, "the next load waits for it"


def test_a_second_ctrl_c_ends_the_engines_and_a_half_file_does_not_count(
    alone: dict[str, str], models: Path, tmp_path: Path
) -> None:
    with (
        slow_disk(alone, tmp_path / "slow", 60.0) as environment,
        serving(environment, models / "long.gguf", log=tmp_path / "log") as front,
    ):
        assert cached_tokens(front) == 0
        front.process.send_signal(signal.SIGINT)
        wait_until("it says that it saves", lambda: "saving 1 conversation" in (tmp_path / "log").read_text())
        assert front.end(signal.SIGINT) == 130
        if sys.platform == "linux":
            wait_until("its engine is gone", lambda: not processes_of(environment))
    assert not list((tmp_path / "cache").rglob("*.kv"))
