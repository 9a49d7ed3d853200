"""Watching an engine: every step is told, slow watchers lose records, and nobody else pays for it."""

from __future__ import annotations

import asyncio

import pytest

from edgelm.engine.core import SamplingParams
from edgelm.engine.engine import Engine
from edgelm.engine.watch import KEPT, KVRecord, StepRecord, Watch, Watcher
from tests.engine.test_counters import Repeating
from tests.engine.test_engine import ENDLESS, emptied, events_of, greedy, running_engine

LIMIT_S = 30.0


async def records_until_the_end(watcher: Watcher) -> tuple[list[StepRecord], list[KVRecord]]:
    """Return the records up to the step in which a sequence ends."""
    steps: list[StepRecord] = []
    caches: list[KVRecord] = []
    async with asyncio.timeout(LIMIT_S):
        while not any(chunk.finish_reason for step in steps for chunk in step.chunks):
            num_lost, records = await watcher.take()
            assert num_lost == 0
            steps += [record for record in records if isinstance(record, StepRecord)]
            caches += [record for record in records if isinstance(record, KVRecord)]
    return steps, caches


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("drafter", [None, Repeating])
async def test_the_steps_of_an_answer_add_up(runs_ahead: bool, drafter: type[Repeating] | None) -> None:
    with running_engine(runs_ahead=runs_ahead, drafter=drafter() if drafter else None) as (engine, _):
        watcher = engine.watch()
        events = await events_of(engine.submit([1, 2, 3] * 20, SamplingParams(max_tokens=40, seed=1)))
        steps, _ = await records_until_the_end(watcher)
        watcher.close()
        stats = events[-1].stats
        assert stats
        chunks = [chunk for step in steps for chunk in step.chunks]
        assert [step.number for step in steps] == list(range(1, len(steps) + 1))
        assert [sample.id for chunk in chunks for sample in chunk.sampled] == [
            sample.id for event in events for sample in event.sampled
        ]
        assert sum(chunk.drafted for chunk in chunks) == stats.drafted
        assert sum(chunk.accepted for chunk in chunks) == stats.accepted
        assert {(chunk.prompt_len, chunk.cached, chunk.forced) for chunk in chunks} == {(60, 0, 0)}
        computed = 0
        for chunk in chunks:
            assert chunk.start == computed, "a step goes on behind what is accepted"
            computed += chunk.num_tokens - chunk.drafted + chunk.accepted
        assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "length"]
        assert all(step.step_s > 0 for step in steps)


async def test_a_watcher_sees_the_cache_also_of_an_idle_engine() -> None:
    with running_engine(context=400, capacity=400) as (engine, _):
        await events_of(engine.submit([7] * 100, greedy(5)))
        await emptied(engine)
        watcher = engine.watch()
        async with asyncio.timeout(LIMIT_S):
            _, records = await watcher.take()
        (cache,) = records
        assert isinstance(cache, KVRecord)
        assert cache.usage == 0
        assert [(region.kind, region.num_tokens, region.seq_id) for region in cache.regions] == [("idle", 104, None)]


async def test_the_queue_and_the_namespaces_are_told() -> None:
    with running_engine(max_sequences=1) as (engine, _):
        watcher = engine.watch()
        streams = [engine.submit([number] * 9, greedy(20), cache_namespace=f"key {number}") for number in range(3)]
        await asyncio.gather(*map(events_of, streams))
        async with asyncio.timeout(LIMIT_S):
            _, records = await watcher.take()
        steps = [record for record in records if isinstance(record, StepRecord)]
        assert {step.num_waiting for step in steps} == {0, 1, 2}
        names = [chunk.cache_namespace for step in steps for chunk in step.chunks]
        assert sorted(set(names)) == ["key 0", "key 1", "key 2"]


async def test_a_slow_watcher_loses_the_oldest_records_and_holds_nobody_up() -> None:
    with running_engine(context=4000, capacity=4000) as (engine, _):
        slow = engine.watch()
        await events_of(engine.submit([1] * 9, greedy(KEPT + 100)))
        await emptied(engine)
        async with asyncio.timeout(LIMIT_S):
            num_lost, records = await slow.take()
        steps = [record.number for record in records if isinstance(record, StepRecord)]
        assert len(records) == KEPT
        assert num_lost >= 100
        assert steps == list(range(steps[0], steps[0] + len(steps))), "what is left has no gap"


async def test_an_engine_that_nobody_watches_makes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "add_step", None)
    monkeypatch.setattr(Watch, "add_kv", None)
    monkeypatch.setattr(Watch, "forced", None)
    with running_engine() as (engine, _):
        watcher = engine.watch()
        watcher.close()
        watcher.close()
        assert (await events_of(engine.submit([1, 2], greedy(5))))[-1].finish_reason == "length"


async def test_a_watcher_of_a_loop_that_has_ended_hurts_nobody() -> None:
    with running_engine() as (engine, _):
        await asyncio.to_thread(lambda: asyncio.run(_left(engine)))
        assert (await events_of(engine.submit([1, 2], greedy(5))))[-1].finish_reason == "length"
        stream = engine.submit([3, 4], ENDLESS)
        await anext(stream)
        stream.close()


async def _left(engine: Engine) -> None:
    engine.watch()
