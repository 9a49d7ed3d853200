"""The front's side of an engine process, on programs that stand in for one and behave badly."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from edgelm.config import Places, Settings
from edgelm.errors import EdgeLMError, EngineError
from edgelm.executors import machine
from edgelm.server import engine_link
from edgelm.server.engine_link import EngineProcess, Launcher, owner_of

READY = "{'event': 'ready', 'name': 'fake', 'engine': 'llama', 'device': 'cpu', 'context': 512, 'port': None}"
PRELUDE = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
def emit(event): print(json.dumps(event), flush=True)
"""
LIMIT_S = 30


async def start(program: str, tmp_path: Path) -> EngineProcess:
    link = EngineProcess({"key": "k", "socket": str(tmp_path / "s"), "model": str(tmp_path / "m.gguf")}, verbose=False)
    await asyncio.get_running_loop().subprocess_exec(lambda: link, sys.executable, "-c", PRELUDE + program)
    return link


async def test_progress_then_ready(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        link = await start(f"emit({{'event': 'progress', 'share': 0.5}}); emit({READY}); sys.stdin.read()", tmp_path)
        await link.ready()
        assert link.info
        assert (link.info.name, link.info.context, link.progress) == ("fake", 512, 1.0)
        await link.close()
        assert (await link.ended()).message == "the engine process ended with code 0"


async def test_a_request_to_an_engine_that_was_closed_is_a_broken_connection(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        link = await start(f"emit({READY}); sys.stdin.read()", tmp_path)
        await link.ready()
        await link.close()
        with pytest.raises(httpx2.TransportError):
            await link.client.get("/stats")


async def test_what_it_says_of_its_failure(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S):
        link = await start("emit({'event': 'error', 'message': 'too large', 'hint': 'shrink it'})", tmp_path)
        with pytest.raises(EdgeLMError, match="too large; shrink it"):
            await link.ready()
        await link.close()


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL; memory"),
        ("sys.stderr.write('first\\nlast words'); sys.stderr.flush(); os.abort()", r"killed by SIGABRT \(last words\)"),
        ("sys.stderr.write('x' * 300_000); sys.exit(3)", "ended with code 3"),
        (f"os.kill(os.getpid(), {int(signal.SIGRTMIN) + 3 if sys.platform == 'linux' else 30})", "was killed by"),
    ],
)
async def test_how_it_died(tmp_path: Path, program: str, how: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        link = await start(program, tmp_path)
        with pytest.raises(EngineError, match=how):
            await link.ready()
        await link.close()


async def test_a_machine_where_llama_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def facts(cache: Path, *, notify: object) -> machine.MachineFacts:
        asked.append(cache)
        if len(asked) == 1:
            raise EngineError("cannot make a temporary folder")
        return machine.MachineFacts(canary="failed", reason="crashes on this machine")

    monkeypatch.setattr(machine, "facts", facts)
    launch = Launcher(Settings(), Places({"EDGELM_CACHE_DIR": str(tmp_path)}), None)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match="temporary folder"):
            await launch(tmp_path / "x.gguf")
        for _ in range(2):
            with pytest.raises(EngineError, match="crashes on this machine"):
                await launch(tmp_path / "x.gguf")
    assert asked == [tmp_path, tmp_path], "what failed is tried again, what was found is kept"


async def test_one_that_does_not_leave_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "GRACE_S", 0.1)
    async with asyncio.timeout(LIMIT_S):
        link = await start(f"emit({READY})\nwhile True: time.sleep(1)", tmp_path)
        await link.ready()
        await link.close()
        assert "SIGKILL" in (await link.ended()).message


async def test_a_grandchild_that_keeps_the_pipes_does_not_hold_up_the_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "GRACE_S", 0.1)
    async with asyncio.timeout(LIMIT_S):
        link = await start(f"emit({READY})\nif os.fork(): os._exit(7)\nsys.stdin.read()", tmp_path)
        await link.ready()
        assert "code 7" in (await link.ended()).message
        await link.close()


def test_those_who_have_a_key_share_nothing_with_others() -> None:
    assert owner_of(None) == ""
    assert len({owner_of(None), owner_of("a"), owner_of("b")}) == 3
    assert "secret" not in owner_of("secret")
