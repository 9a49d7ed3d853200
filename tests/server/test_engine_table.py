"""Restarts, pauses, waiting and unloading, on engine processes that a test ends and starts by hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edgelm.base.errors import EngineError, GpuLoadError, ModelError, StillLoadingError
from edgelm.base.workers.messages import Footprint
from edgelm.library.scan import LocalModel, installed
from edgelm.server.engines import slots as engine_slot
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.engines.table import EngineTable
from tests.library.hub_folders import FIRST, SECOND, put
from tests.server.fake_engines import LONG_S, FakeHost, FakeProcess, Launches, until

MODEL = LocalModel("fake", Path("/fake.gguf"))
OTHER = LocalModel("other", Path("/other.gguf"))


async def ask(table: EngineTable, model: LocalModel = MODEL, keep_alive_s: float | None = None) -> FakeProcess:
    """Return the engine that a request gets."""
    async with table.lease(model, keep_alive_s) as slot:
        process = await slot.ready(LONG_S)
        assert isinstance(process, FakeProcess)
        return process


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(engine_slot, "PAUSES_S", (0.0, 0.01, 0.01, 0.02, 0.02, 0.03))
    return Launches()


@pytest.fixture
async def table(launches: Launches) -> AsyncIterator[EngineTable]:
    async with asyncio.timeout(LONG_S), EngineTable(launches, FakeHost(), idle_timeout_s=0) as made:
        yield made


async def test_two_requests_share_one_start(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot, table.lease(MODEL) as same:
        assert slot is same
        waiting = [asyncio.create_task(slot.ready(LONG_S)) for _ in range(2)]
        (await launches.number(1)).load()
        assert {process.pid for process in await asyncio.gather(*waiting)} == {1}
    assert len(launches.processes) == 1


async def test_who_does_not_wait_is_told_the_progress(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        with pytest.raises(StillLoadingError) as first:
            await slot.ready(0)
        assert first.value.progress is None
        (await launches.number(1)).progress = 0.25
        with pytest.raises(StillLoadingError, match="25%") as second:
            await slot.ready(0.01)
        assert second.value.retry_after_s is not None
        launches.processes[0].load()
        assert (await slot.ready(LONG_S)).pid == 1


async def test_a_start_that_fails_says_why_and_is_tried_again(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        for attempt in range(1, 4):
            waiting = asyncio.create_task(slot.ready(LONG_S))
            (await launches.number(attempt)).fail(ModelError(f"attempt {attempt}"))
            with pytest.raises(ModelError, match=f"attempt {attempt}"):
                await waiting
            assert slot.state == "failed"
            assert launches.processes[-1].closed
            await asyncio.sleep(0.05)
        waiting = asyncio.create_task(slot.ready(LONG_S))
        (await launches.number(4)).load()
        assert (await waiting).pid == 4
        assert slot.error is None


async def test_during_the_pause_the_error_is_told_at_once(
    table: EngineTable, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_slot, "PAUSES_S", (LONG_S,) * 6)
    async with table.lease(MODEL) as slot:
        waiting = asyncio.create_task(slot.ready(LONG_S))
        (await launches.number(1)).fail(ModelError("too large"))
        for each in (waiting, slot.ready(LONG_S)):
            with pytest.raises(ModelError, match="too large"):
                await each
        assert len(launches.processes) == 1


async def test_a_death_starts_another_until_they_die_without_an_answer(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        lives = engine_slot.MAX_RESTARTS + 1
        for life in range(1, lives + 1):
            process = await launches.number(life)
            process.load()
            assert (await slot.ready(LONG_S)).pid == life
            process.die()
            await asyncio.sleep(0)
        await until(lambda: slot.state == "failed")
        await asyncio.sleep(0.1)
        assert len(launches.processes) == lives
        waiting = asyncio.create_task(slot.ready(LONG_S))
        (await launches.number(lives + 1)).load()
        assert (await waiting).pid == lives + 1


async def test_a_second_death_is_followed_by_a_pause(
    table: EngineTable, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_slot, "PAUSES_S", (0.0, 0.0, LONG_S, LONG_S, LONG_S, LONG_S))
    async with table.lease(MODEL) as slot:
        for life in (1, 2):
            process = await launches.number(life)
            process.load()
            await slot.ready(LONG_S)
            process.die()
        await until(lambda: slot.state == "starting" and launches.processes[1].closed)
        await asyncio.sleep(0.1)
        assert len(launches.processes) == 2
        with pytest.raises(StillLoadingError, match="because died"):
            await slot.ready(0)


async def test_a_request_during_the_unloading_gets_the_next_engine(launches: Launches) -> None:
    async with asyncio.timeout(LONG_S), EngineTable(launches, FakeHost(), idle_timeout_s=0.05) as table:
        async with table.lease(MODEL) as slot:
            process = await launches.number(1)
            process.load()
            await slot.ready(LONG_S)
            process.may_close.clear()
        await until(lambda: slot.state == "stopping")

        async def ask() -> int:
            async with table.lease(MODEL) as another:
                return (await another.ready(LONG_S)).pid

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        assert len(launches.processes) == 1
        process.may_close.set()
        (await launches.number(2)).load()
        assert await asking == 2


async def test_an_engine_whose_file_was_written_into_is_replaced(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        first = await launches.number(1)
        first.load()
        assert await slot.ready(LONG_S) is first
        first.change = "rewritten"
        waiting = [asyncio.create_task(slot.ready(LONG_S)) for _ in range(2)]
        second = await launches.number(2)
        assert first.closed
        second.load()
        assert await asyncio.gather(*waiting) == [second, second]


async def test_answers_end_with_the_model_that_was_replaced_and_later_requests_get_the_new_one(
    table: EngineTable, launches: Launches
) -> None:
    async with table.lease(MODEL) as slot:
        first = await launches.number(1)
        first.load()
        assert await slot.ready(LONG_S) is first
        first.change = "replaced"
        waiting = [asyncio.create_task(ask(table)) for _ in range(3)]
        await until(lambda: slot.leases == 4)
        await asyncio.sleep(0.05)
        assert not first.closed, "an answer uses it"
        async with table.lease(MODEL):
            with pytest.raises(StillLoadingError, match="its file was replaced"):
                await slot.ready(0)
    second = await launches.number(2)
    assert first.closed
    assert slot.state == "starting"
    assert slot.error is None, "this is no failure"
    second.load()
    assert await asyncio.gather(*waiting) == [second] * 3
    assert len(launches.processes) == 2


async def test_an_engine_whose_file_was_replaced_is_started_again_without_a_pause(
    table: EngineTable, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_slot, "PAUSES_S", (LONG_S,) * 6)
    for number in range(1, engine_slot.MAX_RESTARTS + 4):
        asking = asyncio.create_task(ask(table))
        process = await launches.number(number)
        process.load()
        assert await asking is process
        process.change = "replaced"


def pulled(hub: Path, revision: str, **files: bytes) -> LocalModel:
    """Return the model o/m:Q4_0 after a pull of a revision with these files."""
    put(hub, "o/m", {f"{name}.gguf": data for name, data in files.items()}, revision=revision)
    return next(model for model in installed(hub) if model.name == "o/m:Q4_0")


@pytest.mark.parametrize("file", ["m-Q4_0", "m-Q4_0-00001-of-00002"])
async def test_a_model_that_was_pulled_again_keeps_its_engine(
    table: EngineTable, launches: Launches, tmp_path: Path, file: str
) -> None:
    """A commit of the README alone gives the same bytes another path."""
    files = {file: b"1", file.replace("00001", "00002", 1): b"2"}
    before = pulled(tmp_path, FIRST, **files)
    asking = asyncio.create_task(ask(table, before, math.inf))
    (await launches.number(1)).load()
    first = await asking
    after = pulled(tmp_path, SECOND, **files)
    assert after.path != before.path
    assert await asyncio.gather(*(ask(table, after) for _ in range(3))) == [first] * 3
    [slot] = table.all_slots()
    assert slot.pinned
    assert slot.model is after, "after a crash it is started from there"


@pytest.mark.parametrize("files", [{"m-Q4_0": b"2"}, {"m-Q4_0": b"1", "mmproj": b"p"}])
async def test_a_newer_model_takes_the_place_of_the_one_that_is_loaded(
    launches: Launches, tmp_path: Path, files: dict[str, bytes]
) -> None:
    """There is memory for one of them, and the first is pinned."""
    host = FakeHost(total=1, sizes={"o/m:Q4_0": 1})
    async with asyncio.timeout(LONG_S), EngineTable(launches, host) as table:
        async with table.lease(pulled(tmp_path, FIRST, **{"m-Q4_0": b"1"}), math.inf) as old:
            first = await launches.number(1)
            first.load()
            assert await old.ready(LONG_S) is first
            host.taken[first.pid] = 1
            first.on_end = host.taken.clear
            after = pulled(tmp_path, SECOND, **files)
            asking = [asyncio.create_task(ask(table, after)) for _ in range(3)]
            await until(lambda: after.path in table.slots and table.slots[after.path].leases == 3)
            assert not first.closed, "an answer uses it"
        second = await launches.number(2)
        assert first.closed
        second.load()
        assert await asyncio.gather(*asking) == [second] * 3
        [slot] = table.all_slots()
        assert slot.pinned


async def test_files_of_one_name_that_are_named_by_their_paths_are_two_models(
    table: EngineTable, launches: Launches
) -> None:
    paths = Path("/a/fake.gguf"), Path("/b/fake.gguf")
    for number, path in enumerate(paths, 1):
        asking = asyncio.create_task(ask(table, LocalModel("fake", path)))
        (await launches.number(number)).load()
        await asking
    assert [*table.slots] == [*paths]


async def test_a_model_that_was_pulled_again_is_released_by_its_name(
    table: EngineTable, launches: Launches, tmp_path: Path
) -> None:
    asking = asyncio.create_task(ask(table, pulled(tmp_path, FIRST, **{"m-Q4_0": b"1"}), math.inf))
    (await launches.number(1)).load()
    first = await asking
    assert table.release(pulled(tmp_path, SECOND, **{"m-Q4_0": b"2"}))
    await until(lambda: first.closed)


async def test_an_engine_that_dies_while_its_file_is_looked_at(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        first = await launches.number(1)
        first.load()
        assert await slot.ready(LONG_S) is first
        first.looked.clear()
        waiting = asyncio.create_task(slot.ready(LONG_S))
        await asyncio.sleep(0)
        first.die()
        second = await launches.number(2)
        first.looked.set()
        second.load()
        assert await waiting is second


async def test_who_does_not_wait_gets_an_engine_that_is_ready(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        process = await launches.number(1)
        process.load()
        await slot.ready(LONG_S)
        process.looked.clear()
        waiting = asyncio.create_task(slot.ready(0))
        await asyncio.sleep(0.05)
        process.looked.set()
        assert await waiting is process


async def test_an_answer_resets_the_count_of_failures(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        for life in range(1, 3 * engine_slot.MAX_RESTARTS):
            process = await launches.number(life)
            process.load()
            assert (await slot.ready(LONG_S)).pid == life
            slot.answered()
            process.die()
            assert (await slot.exit_error(process)).message == "died"


async def test_only_what_nobody_uses_is_unloaded(launches: Launches) -> None:
    async with asyncio.timeout(LONG_S), EngineTable(launches, FakeHost(), idle_timeout_s=0.05) as table:
        async with table.lease(MODEL) as slot:
            (await launches.number(1)).load()
            await slot.ready(LONG_S)
            await asyncio.sleep(0.2)
            assert not launches.processes[0].closed, "it is in use"
        await until(lambda: launches.processes[0].closed)
        async with table.lease(MODEL) as another:
            assert another is not slot
            (await launches.number(2)).load()
            assert (await another.ready(LONG_S)).pid == 2


async def test_closing_ends_all_and_lets_nobody_wait(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as loading, table.lease(OTHER) as ready:
        waiting = asyncio.create_task(loading.ready(LONG_S))
        await launches.number(1)
        (await launches.number(2)).load()
        process = await ready.ready(LONG_S)
        await table.close()
        with pytest.raises(EngineError, match="shutting down"):
            await waiting
        assert "shutting down" in (await ready.exit_error(process)).message
    assert all(process.closed for process in launches.processes)
    assert table.slots == {}
    with pytest.raises(EngineError, match="shutting down"):
        async with table.lease(MODEL):
            pass


@pytest.mark.parametrize("how", ["dies", "GPU"])
async def test_unloading_waits_for_a_process_that_ends_by_itself(
    table: EngineTable, launches: Launches, how: str
) -> None:
    """Its memory is not free before it is gone, and its socket is removed."""
    async with table.lease(MODEL) as slot:
        process = await launches.number(1)
        if how == "dies":
            process.load()
            await slot.ready(LONG_S)
            process.progress = 1.0
        process.may_close.clear()
        if how == "dies":
            process.die()
        else:
            process.fail(GpuLoadError("the memory of the GPU is used up", "lower --ctx"))
        async with asyncio.timeout(LONG_S):
            await process.closing.wait()
        progress = slot.progress
    unloading = asyncio.create_task(table.unload(slot))
    await until(lambda: slot.state == "stopping")
    for _ in range(100):
        await asyncio.sleep(0)
    is_unloaded, has_memory = unloading.done(), slot.admitted
    table.kill()
    is_killed = process.killed
    process.may_close.set()
    await unloading
    assert progress is None, "the next one has not begun"
    assert not is_unloaded
    assert has_memory
    assert is_killed
    assert process.closed
    assert not slot.admitted
    assert len(launches.processes) == 1


async def test_a_bug_in_starting_wakes_who_waits() -> None:
    async def launch(_: LocalModel, __: Footprint | None) -> FakeProcess:
        raise ZeroDivisionError

    async def admit(_: EngineSlot) -> None: ...

    slot = EngineSlot(MODEL, launch, admit)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await slot.ready(LONG_S)
    await slot.stop("is gone")


async def test_a_model_that_the_gpu_cannot_load_is_loaded_again_at_once(table: EngineTable, launches: Launches) -> None:
    async with table.lease(MODEL) as slot:
        waiting = asyncio.create_task(slot.ready(LONG_S))
        (await launches.number(1)).fail(GpuLoadError("the memory of the GPU is used up", "lower --ctx"))
        second = await launches.number(2)
        assert launches.processes[0].closed
        with pytest.raises(StillLoadingError, match="loaded again, because the memory of the GPU is used up"):
            await slot.ready(0)
        second.load()
        assert (await waiting).pid == 2
        assert slot.error is None
