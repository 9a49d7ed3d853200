"""The processes that check grammars: what ends them, and that the next grammar is served."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edgelm.base.errors import EngineError, RequestError
from edgelm.base.workers.grammars import CheckedGrammar, GrammarSpec
from edgelm.base.workers.parent import Worker
from edgelm.engine.sampling.grammar_checker import GrammarChecker

LIMIT_S = 30.0
GOOD = GrammarSpec("regex", "[ab]+")
ENDLESS = GrammarSpec("json_schema", json.dumps({"type": "integer", "multipleOf": 99_999_989}))


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    await checker.close()


async def test_the_first_grammar_finds_a_process(checker: GrammarChecker) -> None:
    started = set(checker._workers)
    assert isinstance(await checker.check(GOOD), CheckedGrammar)
    assert checker._workers == started


async def test_many_at_once_are_all_answered(checker: GrammarChecker) -> None:
    specs = [GOOD, GrammarSpec("regex", "("), GrammarSpec("json_object")] * 5
    results = await asyncio.gather(*map(checker.check, specs), return_exceptions=True)
    assert [type(result) for result in results] == [CheckedGrammar, RequestError, CheckedGrammar] * 5
    assert len(checker._workers) <= 2


async def test_a_grammar_without_end_ends_its_process_alone(checker: GrammarChecker) -> None:
    await asyncio.gather(checker.check(GOOD), checker.check(GOOD))  # starts both processes
    endless = asyncio.create_task(checker.check(ENDLESS))
    for _ in range(3):
        assert isinstance(await checker.check(GOOD), CheckedGrammar)
    assert not endless.done(), "the others did not wait for it"
    with pytest.raises(RequestError, match="too long"):
        await endless
    assert len(checker._workers) <= 1


async def test_a_process_that_is_killed_is_replaced(checker: GrammarChecker) -> None:
    await checker.check(GOOD)
    (worker,) = checker._workers
    worker.kill()
    await worker.aexit()
    assert isinstance(await checker.check(GOOD), CheckedGrammar)
    assert len(checker._workers) == 1


async def test_a_machine_without_time_is_not_the_grammars_fault() -> None:
    checker = GrammarChecker(limit_s=0.001)
    with pytest.raises(EngineError, match="try again"):
        await checker.check(GOOD)
    await checker.close()


async def test_a_cancelled_check_leaves_no_process(checker: GrammarChecker) -> None:
    await checker.check(GOOD)
    task = asyncio.create_task(checker.check(ENDLESS))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not checker._workers
    assert isinstance(await checker.check(GOOD), CheckedGrammar)


@pytest.mark.parametrize("closes", [False, True])
async def test_a_process_whose_client_leaves_while_it_starts_is_used_or_ends(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    checker = GrammarChecker()
    checker._idle.clear()  # as while the first process is in use
    first = set(checker._workers)
    may_start, new_worker = threading.Event(), checker._new_worker
    started: list[Worker] = []

    def start() -> Worker:
        assert may_start.wait(LIMIT_S)
        started.append(new_worker())
        return started[-1]

    monkeypatch.setattr(checker, "_new_worker", start)
    for _ in range(3):  # one more than can be used
        leaving = asyncio.create_task(checker.check(GOOD))
        await asyncio.sleep(0)  # it begins
        leaving.cancel()
        await asyncio.wait({leaving})
    if closes:
        await checker.close()
    may_start.set()
    async with asyncio.timeout(LIMIT_S):
        for _ in range(int(LIMIT_S / 0.01)):
            kept = [worker for worker in started if not worker.exited]
            if len(started) == 3 and len(kept) == (0 if closes else 2):
                break
            await asyncio.sleep(0.01)
        assert set(kept) == set(checker._idle) == checker._workers - first
        if not closes:
            assert isinstance(await checker.check(GOOD), CheckedGrammar)
            assert checker._workers - first == set(kept), "one of them was used"
        await checker.close()


async def test_closing_ends_checks_in_progress() -> None:
    checker = GrammarChecker()
    task = asyncio.create_task(checker.check(ENDLESS))
    await asyncio.sleep(0.3)
    await checker.close()
    with pytest.raises(EngineError):
        await task
    with pytest.raises(EngineError):
        await checker.check(GOOD)
