"""A device that fails for good, or hangs: every client hears of it once, and nothing waits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from edgelm.engine import watchdog
from edgelm.engine.watchdog import Watchdog
from edgelm.errors import DeviceError, EngineError
from tests.engine.fake import Fault
from tests.engine.test_engine import ENDLESS, events_of, greedy, running_engine


async def test_a_device_that_fails_for_good_ends_all_requests_and_the_engine() -> None:
    told: list[DeviceError] = []
    with running_engine(max_sequences=1) as (engine, executor):
        engine.on_broken(told.append)
        executor.faults[3] = Fault("chunks", error=DeviceError)
        running = asyncio.create_task(events_of(engine.submit([1, 2], ENDLESS)))
        waiting = asyncio.create_task(events_of(engine.submit([3, 4], ENDLESS)))
        for task in (running, waiting):
            with pytest.raises(DeviceError, match="a fault was injected"):
                await asyncio.wait_for(task, 30)
        with pytest.raises(DeviceError, match="a fault was injected"):
            engine.submit([5], greedy(2))
        for _ in range(500):
            if told:
                break
            await asyncio.sleep(0.01)
        assert [str(error) for error in told] == ["a fault was injected"]
        late: list[DeviceError] = []
        engine.on_broken(late.append)
        assert late == told, "who asks later is told at once"
        assert executor.num_steps == 4, "nothing is computed after it"


async def test_another_failure_is_of_its_requests_alone() -> None:
    with running_engine(max_sequences=1) as (engine, executor):
        executor.faults[3] = Fault("chunks", error=EngineError)
        with pytest.raises(EngineError, match="a fault was injected"):
            await events_of(engine.submit([1, 2], ENDLESS))
        assert len(await events_of(engine.submit([5], greedy(2)))) >= 1


async def test_a_step_that_never_ends_is_told_from_another_thread() -> None:
    hung = threading.Event()
    with running_engine(hang_s=0.2) as (engine, executor):
        engine.on_hang(lambda error: hung.set() if "did not finish a step" in str(error) else None)
        await events_of(engine.submit([1, 2], greedy(3)))
        assert not hung.is_set()
        executor.gate.clear()
        stream = engine.submit([1, 2], greedy(3))
        assert await asyncio.to_thread(hung.wait, 30)
        executor.gate.set()
        await events_of(stream)


class Clock:
    """The time and the pauses of a watchdog: a pause takes as long as the test says."""

    def __init__(self, pauses: list[float]) -> None:
        self.now = 0.0
        self._pauses = pauses

    def monotonic(self) -> float:
        return self.now

    def wait(self, _: float) -> bool:
        self.now += self._pauses.pop(0) if self._pauses else 0.0
        return not self._pauses


@pytest.mark.parametrize(
    ("pauses", "barks"),
    [([1.0] * 30, True), ([1.0] * 12, False), ([1.0, 3600.0, *[1.0] * 10], False), ([1.0, 3600.0, *[1.0] * 20], True)],
    ids=["a hang", "a long step", "a machine that slept", "a hang after it"],
)
def test_time_in_which_nothing_ran_does_not_count(
    pauses: list[float], barks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, heard = Clock(pauses), []
    monkeypatch.setattr(watchdog.time, "monotonic", clock.monotonic)
    dog = Watchdog(16.0, lambda: heard.append(clock.now))
    monkeypatch.setattr(dog._ended, "wait", clock.wait)
    dog.begin()
    dog._watch()
    assert bool(heard) is barks


def test_many_short_steps_are_no_hang() -> None:
    heard = []
    dog = Watchdog(0.1, lambda: heard.append(1))
    dog.start()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        dog.begin()
        time.sleep(0.002)
        dog.end()
    dog.close()
    assert not heard
