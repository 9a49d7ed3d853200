"""Idle conversations reach files: in the background, and what is left of them at the end, with reports of progress."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgelm.engine import engine as engine_module
from edgelm.engine.clock import StepClock
from edgelm.engine.core import ExecutorInfo, SamplingParams, Save, Step, Store
from edgelm.engine.engine import Engine
from edgelm.engine.kv_paged import BLOCK_LEN, PagedKV
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.prefixes import MIN_PREFIX_LEN
from edgelm.engine.scheduler import Scheduler
from tests.engine.fake import FakeExecutor, FakeFiles, PagedMemory, SlotMemory, info

LIMIT_S = 60.0
BOTH = pytest.mark.parametrize("kind", ["slots", "paged"])


class Recorder(FakeExecutor):
    """A fake that keeps the steps without chunks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.flushed: list[Step] = []

    def forward(self, step: Step) -> None:
        if not step.chunks:
            self.flushed.append(step)
        super().forward(step)

    @property
    def stored(self) -> list[int]:
        """The first tokens of the stored conversations."""
        return [int(op.tokens[0]) for step in self.flushed for op in step.ops if isinstance(op, Store)]


def parts(kind: str, facts: ExecutorInfo, files: FakeFiles) -> tuple[SlotKV | PagedKV, SlotMemory | PagedMemory]:
    if kind == "slots":
        slots = SlotMemory(facts, 10**6, files)
        return SlotKV(facts, 10**6, slots, MIN_PREFIX_LEN), slots
    paged = PagedMemory(facts, BLOCK_LEN, files)
    return PagedKV(facts, BLOCK_LEN, paged, MIN_PREFIX_LEN), paged


@contextmanager
def running(kind: str) -> Iterator[tuple[Engine, Recorder]]:
    facts = info()
    kv, memory = parts(kind, facts, FakeFiles())
    executor = Recorder(facts, memory)
    clock = StepClock()
    engine = Engine(executor, Scheduler(facts, kv, clock), clock).start()
    try:
        yield engine, executor
    finally:
        engine.close()


async def ask(engine: Engine, token: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    async with asyncio.timeout(LIMIT_S):
        async for _ in engine.submit([token] * 50, params):
            pass


@BOTH
async def test_the_end_stores_conversations_last_used_first_and_reports_each_progress(kind: str) -> None:
    with running(kind) as (engine, executor):
        for token in (1, 2, 3, 1):
            await ask(engine, token)
        reports: list[int] = []
        await asyncio.to_thread(engine.stop, reports.append)
        assert executor.stored == [1, 3, 2]
        saves = [sum(isinstance(op, Save) for op in step.ops) for step in executor.flushed]
        assert max(saves) <= 1, "a report comes between two copies"
        assert reports == [3] * len(saves)


@BOTH
async def test_the_end_stores_only_what_changed_since_the_background_did(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FLUSH_IDLE_AFTER_S", 0.01)
    with running(kind) as (engine, executor):
        for token in (1, 2, 1, 2):  # the second time they are a conversation
            await ask(engine, token)
        async with asyncio.timeout(LIMIT_S):
            while sorted(executor.stored) != [1, 2]:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        monkeypatch.setattr(engine_module, "FLUSH_IDLE_AFTER_S", LIMIT_S)
        await ask(engine, 3)
        executor.flushed.clear()
        await asyncio.to_thread(engine.stop)
        assert executor.stored in ([3], []), "the background may have stored it, too"


@BOTH
def test_an_engine_without_conversations_ends_without_a_report(kind: str) -> None:
    with running(kind) as (engine, executor):
        engine.stop(lambda _: pytest.fail("there is nothing to save"))
        assert not executor.flushed
