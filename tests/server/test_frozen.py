"""A frozen engine process is noticed, on a machine whose time is virtual; and a real one that SIGSTOP froze."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from edgelm.commands.ps import _show as show
from edgelm.server.engines import process as engine_process
from edgelm.server.engines.process import FROZEN_S, TICK_S, processor_s, until_frozen
from edgelm.server.engines.slots import EngineSlot
from tests.server.fake_engines import LONG_S, Launches, model_called
from tests.server.harness import ENDLESS, Front, serving, until
from tests.server.virtual_time import VirtualLoop


class Engine:
    """A process, and the machine under it."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.in_use = asyncio.Event()
        self.in_use.set()
        self.used_s: float | None = 1.0
        self.alive = False
        self.slept_s = 0.0  # by the machine
        self.silences: list[float] = []

    def processor_s(self) -> float | None:
        return self.used_s

    async def answers(self) -> bool:
        return self.alive

    def watched(self, live: Callable[[Engine], Coroutine[Any, Any, None]]) -> float | None:
        """Return after how many seconds it was taken for frozen, while it lives so; None: it never was."""

        async def run() -> float | None:
            watching = asyncio.create_task(until_frozen(self, self.in_use, self.silences.append))
            living = asyncio.create_task(live(self))
            await asyncio.wait({watching, living}, return_when=asyncio.FIRST_COMPLETED)
            living.cancel()
            if watching.done():
                return self.loop.time()
            watching.cancel()
            return None

        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            return runner.run(run())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(engine_process, "suspended_s", lambda: made.slept_s)
    return made


async def an_hour(_: Engine) -> None:
    await asyncio.sleep(3600)


def test_a_frozen_engine_is_noticed_after_the_limit(engine: Engine) -> None:
    assert engine.watched(an_hour) == FROZEN_S
    assert engine.silences == [TICK_S * tick for tick in range(1, round(FROZEN_S / TICK_S) + 1)]


async def computes(engine: Engine) -> None:
    for _ in range(3600):
        await asyncio.sleep(1)
        assert engine.used_s is not None
        engine.used_s += 0.01


async def answers(engine: Engine) -> None:
    engine.alive = True  # as one whose client reads slowly, or whose kernels are compiled by others
    await an_hour(engine)


async def has_a_reason(engine: Engine) -> None:
    engine.used_s = None  # it waits for a disk, or a debugger holds it
    await an_hour(engine)


async def is_not_used(engine: Engine) -> None:
    engine.in_use.clear()
    await an_hour(engine)


async def is_used_for_moments(engine: Engine) -> None:
    for _ in range(100):
        engine.in_use.set()
        await asyncio.sleep(FROZEN_S - 2 * TICK_S)
        engine.in_use.clear()
        await asyncio.sleep(2 * TICK_S)


async def machine_is_suspended(engine: Engine) -> None:
    for _ in range(100):
        await asyncio.sleep(FROZEN_S - 2 * TICK_S)
        engine.slept_s += 3600  # the clock of the loop stands still meanwhile


async def front_is_stopped(engine: Engine) -> None:
    for _ in range(100):
        await asyncio.sleep(FROZEN_S - 2 * TICK_S)
        engine.loop.seconds += 60  # with the engine, as by a debugger or in a paused virtual machine


async def thaws(engine: Engine) -> None:
    await asyncio.sleep(FROZEN_S - TICK_S - 0.5)
    engine.used_s, engine.alive = 1.5, True
    await an_hour(engine)


@pytest.mark.parametrize(
    "live",
    [computes, answers, has_a_reason, is_not_used, is_used_for_moments, machine_is_suspended, front_is_stopped, thaws],
)
def test_an_engine_with_a_sign_of_life_stays(
    engine: Engine, live: Callable[[Engine], Coroutine[Any, Any, None]]
) -> None:
    assert engine.watched(live) is None


def test_its_clients_are_told_and_the_next_engine_starts() -> None:
    loop, launches = VirtualLoop(), Launches()
    told = []

    async def main() -> None:
        slot = EngineSlot(model_called("m"), launches, admit)
        (await launches.number(1)).load()
        with slot.lease():
            process = await slot.ready(LONG_S)
            launches.processes[0].used_s, launches.processes[0].is_alive = 1.0, False
            told.append(str(await process.ended()))
            told.append(str(slot.error))
        (await launches.number(2)).load()
        assert (await slot.ready(LONG_S)).pid == 2
        assert (slot.num_restarts, slot.silent_s) == (1, 0.0)
        await slot.stop("ends")

    async def admit(slot: EngineSlot) -> None:
        slot.admitted = True

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert told[0].startswith("the engine process was frozen: no processor time and no answer for 20 s")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the processor time")
def test_the_processor_time_of_this_process(tmp_path: Path) -> None:
    assert processor_s(os.getpid()) is None, "it runs"
    assert processor_s(2**22 + 1) is None, "there is none"
    assert engine_process.suspended_s() >= -0.1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the processor time")
def test_a_stopped_engine_is_ended(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    """SIGSTOP in the middle of a stream: its client is told, ps shows it, and the next request has a new engine."""
    with serving(own, models / "long.gguf", log=tmp_path / "log", module="tests.server.impatient_front") as front:
        events = front.events("long", max_tokens=20_000, **ENDLESS)
        next(events)
        pid = front.ps("long")["pid"]
        os.kill(pid, signal.SIGSTOP)
        until("ps shows it", lambda: is_silent(front, pid))
        last = [*events][-1]
        assert last["error"]["code"] == "engine_died"
        assert "the engine process was frozen" in last["error"]["message"]
        assert front.chat("long").status_code == 200
        assert front.ps("long")["pid"] != pid
    assert "long: the engine process was frozen" in (tmp_path / "log").read_text()


def is_silent(front: Front, pid: int) -> bool:
    state = front.ps("long")
    return bool(state["silent_s"]) or state["pid"] != pid


ENGINE = {"model": "m", "state": "ready", "progress": 1.0, "pid": 7, "context": 512, "engine": "llama", "device": "cpu"}
ENGINE |= {"memory_bytes": 1, "predicted_bytes": 1, "requests": 1, "pinned": False, "expires_in_s": None}
STATE = {"version": "1", "address": "a", "pid": 1, "memory": {"limit_bytes": None, "free_bytes": 1}}


def test_ps_tells_of_a_frozen_engine(capsys: pytest.CaptureFixture[str]) -> None:
    show(STATE | {"models": [ENGINE | {"waits_for": None, "error": None, "silent_s": 12.3}]}, "")
    plain = capsys.readouterr().out
    assert "m: its process is frozen for 12 s; it is ended soon" in plain
    assert "GPU" not in plain


def test_ps_tells_of_the_memory_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    memory = {"limit_bytes": None, "free_bytes": 1, "gpu_free_bytes": 3 * 2**30}
    partial = ENGINE | {"device": "CUDA0, 20 of 37 layers", "gpu_bytes": 2**30, "waits_for": None, "error": None}
    show(STATE | {"models": [partial], "memory": memory}, "")
    lines = capsys.readouterr().out.splitlines()
    assert "GPU" in lines[1].split()
    assert lines[-1] == "GPU: 1.07 GB predicted; 3.22 GB are free"
