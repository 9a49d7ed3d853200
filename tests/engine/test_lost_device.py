"""A device that fails for good, or hangs: every request ends with one error, and the process is told to end."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest

from edgelm.base.errors import DeviceError, EngineError
from edgelm.engine import watchdog
from edgelm.engine.core import Chunk, ExecutorInfo, SamplingParams, Sequence, Step
from edgelm.engine.watchdog import Watchdog
from tests.engine.fake import info
from tests.engine.test_engine import ENDLESS, events_of, running_engine

LIMIT_S = 30.0
ON_GPU = {"engine": "torch", "device": "GPU X"}


async def test_a_failure_of_the_device_ends_every_request_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[DeviceError] = []
    with running_engine(max_sequences=2) as (engine, executor):
        engine.when_lost = told.append
        forward, steps = executor.forward, itertools.count()

        def fail(step: Step) -> None:
            if next(steps) == 5:
                raise DeviceError("the GPU failed: CUDA error: unspecified launch failure", "try again")
            forward(step)

        monkeypatch.setattr(executor, "forward", fail)
        streams = [engine.submit([7, i], ENDLESS) for i in range(4)]  # two of them wait for a slot
        async with asyncio.timeout(LIMIT_S):
            for stream in streams:
                with pytest.raises(EngineError, match="unspecified launch failure; try again"):
                    await events_of(stream)
        assert [str(error) for error in told] == ["the GPU failed: CUDA error: unspecified launch failure; try again"]
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.submit([7], ENDLESS)


async def test_a_step_that_hangs_is_told_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GPU_S", 0.05)
    monkeypatch.setattr(Watchdog.__init__, "__defaults__", (0.01,))
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    with running_engine(**ON_GPU) as (engine, executor):
        engine.when_lost = lambda _: loop.call_soon_threadsafe(told.set)  # type: ignore[assignment,return-value]
        executor.gate.clear()
        stream = engine.submit([7, 8, 9], ENDLESS)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineError, match=r"the GPU hangs: a step of 3 tokens did not end within \d+ s"):
                await events_of(stream)
            await told.wait()


class Watched:
    """A thread under a watchdog with short ticks, whose limits are those of an engine of `facts`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_s: float, **facts: object) -> None:
        for name in ("GPU_S", "GPU_OTHER_S", "IDLE_S"):
            monkeypatch.setattr(watchdog, name, limit_s)
        self.hung = threading.Event()
        made: ExecutorInfo = info(**facts)
        self.dog = Watchdog(made, lambda _: self.hung.set(), tick_s=0.01)

    def run(self, work_s: float, busy: bool = False) -> bool:
        """Return whether a piece of work, which computes or waits, counts as a hang."""

        def work() -> None:
            self.dog.start()
            self.dog.begin()
            end = time.monotonic() + work_s
            while time.monotonic() < end and not self.hung.is_set():
                if not busy:
                    time.sleep(0.002)
            self.dog.work = None

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self.dog.close()
        return self.hung.is_set()


def test_on_a_processor_only_a_thread_that_computes_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Watched(monkeypatch, 0.15).run(0.5, busy=True)
    monkeypatch.setattr(watchdog, "LEAST_CPU_S", 1.0)  # the loop above wakes up now and then
    assert Watched(monkeypatch, 0.15).run(LIMIT_S)


def test_on_a_gpu_a_thread_that_waits_busily_hangs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watched(monkeypatch, 0.15, **ON_GPU).run(LIMIT_S, busy=True)
    assert not Watched(monkeypatch, LIMIT_S, **ON_GPU).run(0.2)


def test_time_in_which_the_watchdog_did_not_run_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was stopped, or the machine slept: the clock jumps by an hour at each tick."""
    watched = Watched(monkeypatch, 10.0, **ON_GPU)
    ticked = threading.Semaphore(0)

    class Clock:
        hours = 0.0

        def monotonic(self) -> float:
            return self.hours

        def clock_gettime(self, _: int) -> float:
            return self.hours

        def sleep(self, _: float) -> None:
            self.hours += 3600
            ticked.release()
            time.sleep(0.001)

    watched.dog.begin()
    monkeypatch.setattr(watchdog, "time", Clock())
    watched.dog.start()
    for _ in range(20):
        assert ticked.acquire(timeout=LIMIT_S)
    watched.dog.close()
    assert not watched.hung.is_set()


def test_a_thread_that_has_ended_can_still_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for its clock would crash the process."""
    watched = Watched(monkeypatch, LIMIT_S)
    thread = threading.Thread(target=watched.dog.start)
    thread.start()
    thread.join()
    assert watched.dog._cpu_s() > 0
    watched.dog.close()


@pytest.mark.parametrize(("num_tokens", "limit_s"), [(1, 60.1), (1024, 162.4)])
def test_a_step_on_a_gpu_gets_time_for_its_tokens(num_tokens: int, limit_s: float) -> None:
    seq = Sequence(0, [1] * num_tokens, num_tokens, SamplingParams())
    step = Step((Chunk(seq, 0, seq.tokens, 1, 0),))
    assert Watchdog(info(**ON_GPU), lambda _: None)._limit_s(step) == pytest.approx(limit_s)
