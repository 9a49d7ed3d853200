"""Memory for several models: who is loaded, who is unloaded for it, who waits, and who is refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edgelm.base.errors import EdgeLMError, ModelError, StillLoadingError
from edgelm.base.workers.messages import Footprint
from edgelm.library.scan import LocalModel
from edgelm.server.engines import memory
from edgelm.server.engines.memory import DRAIN_S, ROOM_LIMIT_S, Measured
from edgelm.server.engines.slots import EngineSlot
from edgelm.server.engines.table import EngineTable
from tests.counts import Count
from tests.server.fake_engines import FakeHost, FakeProcess, Launches, footprint, model_called
from tests.server.virtual_time import VirtualLoop

LOAD_S = 2.0
PEAK = 1.3  # of a model's size, while it loads
LONGEST_S = 50.0  # that the first may wait in the state machine: an answer of 30 s, and some looks and loads
EXAMPLES = Count(test=10, soak=1000)
A, B, C, D = (model_called(name) for name in "abcd")


class Machine(FakeHost):
    """A machine on which engines take memory as they load, more for a moment than later."""

    def __init__(self, total: int, sizes: dict[str, int], limit: int | None = None) -> None:
        super().__init__(total, sizes)
        self.limit = limit
        self.most = 0

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        plain = await super().predict(model, usable_bytes, freed_gpu_bytes)
        await asyncio.sleep(0.5)
        return footprint(plain.total_bytes, peak=int(PEAK * plain.total_bytes))

    def take(self, pid: int, nbytes: int) -> None:
        if nbytes:
            self.taken[pid] = nbytes
        else:
            self.taken.pop(pid, None)
        self.most = max(self.most, sum(self.taken.values()))


class Engines(Launches):
    """Engines that load in LOAD_S."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.living: dict[str, FakeProcess] = {}
        self.twins: list[str] = []  # models that had two engines

    async def __call__(self, model: LocalModel, planned: Footprint | None) -> FakeProcess:
        process = await super().__call__(model, planned)
        loop, size = asyncio.get_running_loop(), self.machine.sizes.get(model.name, 1)
        self.twins += [model.name] if model.name in self.living else []
        self.living[model.name] = process
        steps = [(LOAD_S / 2, int(PEAK * size)), (LOAD_S, size)]
        timers = [loop.call_later(delay, self.machine.take, process.pid, nbytes) for delay, nbytes in steps]
        timers.append(loop.call_later(LOAD_S, process.load))

        def ended() -> None:
            for timer in timers:
                timer.cancel()
            self.machine.take(process.pid, 0)
            self.living.pop(model.name, None)

        process.on_end = ended
        return process


class CardHost(FakeHost):
    """A machine with a GPU, on which llama.cpp places as much of a model as is free; `cards` says how much that is."""

    def __init__(self, sizes: dict[str, int], cards: dict[str, int], gpu_total: int | None) -> None:
        super().__init__(100, sizes)
        self.cards = cards
        self.gpu_total = gpu_total  # None: nothing tells what is free of it
        self.on_card: dict[int, int] = {}  # process: bytes

    @property
    def gpu_free(self) -> int:
        return (self.gpu_total or 0) - sum(self.on_card.values())

    async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
        wanted, free = self.cards.get(model.name, 0), self.gpu_free + freed_gpu_bytes
        there = wanted if self.gpu_total is None else max(0, min(wanted, free))
        size = self.sizes.get(model.name, 1) + wanted - there
        if usable_bytes is not None and size > usable_bytes:
            raise ModelError(f"{model.name} needs {size}, {usable_bytes} are free")
        return footprint(size, device="gpu" if wanted else "cpu", offloaded=there)

    async def measure(self, pids: Collection[int]) -> Measured:
        measured = await super().measure(pids)
        if self.gpu_total is None:
            return measured
        return replace(measured, gpu_free_bytes=self.gpu_free, one_gpu_free_bytes=self.gpu_free)


class CardEngines(Launches):
    """Engines that load at once, in the memory that they were promised."""

    def __init__(self, host: CardHost) -> None:
        super().__init__()
        self.host = host
        self.promised: dict[str, Footprint | None] = {}

    async def __call__(self, model: LocalModel, planned: Footprint | None) -> FakeProcess:
        process = await super().__call__(model, planned)
        self.promised[model.name] = planned
        planned = planned or await self.host.predict(model, None)
        loop, on_card, taken = asyncio.get_running_loop(), self.host.on_card, self.host.taken
        timer = loop.call_later(LOAD_S, process.load)
        timers = [timer, loop.call_later(LOAD_S / 2, on_card.update, {process.pid: planned.offloaded_bytes})]
        timers.append(loop.call_later(LOAD_S / 2, taken.update, {process.pid: planned.total_bytes}))

        def ended() -> None:
            for each in timers:
                each.cancel()
            on_card.pop(process.pid, None)
            taken.pop(process.pid, None)

        process.on_end = ended
        return process


@asynccontextmanager
async def with_card(
    sizes: dict[str, int], cards: dict[str, int], gpu_total: int | None
) -> AsyncIterator[tuple[EngineTable, CardEngines]]:
    engines = CardEngines(CardHost(sizes, cards, gpu_total))
    async with EngineTable(engines, engines.host) as table:
        yield table, engines


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in a loop whose clock jumps."""

    @wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(test(*arguments, **fixtures))
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    return run


@asynccontextmanager
async def served(
    total: int, sizes: dict[str, int], *, limit: int | None = None, max_models: int | None = None
) -> AsyncIterator[tuple[EngineTable, Engines]]:
    engines = Engines(Machine(total, sizes, limit))
    async with EngineTable(engines, engines.machine, limit_bytes=limit, max_models=max_models) as table:
        yield table, engines


async def ask(table: EngineTable, model: LocalModel, seconds: float = 1.0, keep_alive_s: float | None = None) -> None:
    async with table.lease(model, keep_alive_s) as slot:
        await slot.ready(600)
        await asyncio.sleep(seconds)


def loaded(table: EngineTable) -> list[str]:
    return sorted(slot.model.name for slot in table.slots.values() if slot.state == "ready")


@in_virtual_time
async def test_the_least_recently_used_idle_model_makes_room() -> None:
    async with served(10, {"a": 4, "b": 4, "c": 4}) as (table, _):
        for model in (A, B, A):
            await ask(table, model)
        await ask(table, C)
        assert loaded(table) == ["a", "c"]


@in_virtual_time
async def test_a_model_that_fits_beside_the_others_unloads_none() -> None:
    async with served(12, {"a": 4, "b": 4, "c": 4}) as (table, _):
        for model in (A, B, C):
            await ask(table, model)
        assert loaded(table) == ["a", "b", "c"]


@in_virtual_time
async def test_two_loads_at_once_do_not_count_the_same_free_bytes() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, engines):
        await asyncio.gather(ask(table, A, 5), ask(table, B, 5))
        assert engines.machine.most <= PEAK * 6
        assert loaded(table) == ["b"], "it came second, and the first was idle then"


@in_virtual_time
async def test_two_loads_at_once_where_memory_is_ample() -> None:
    async with served(100, {"a": 6, "b": 6}) as (table, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(ask(table, A, 0), ask(table, B, 0))
        assert loop.time() - began < 2 * LOAD_S


@in_virtual_time
async def test_a_busy_model_is_waited_for_and_then_makes_room() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, _):
        busy = asyncio.create_task(ask(table, A, 20))
        await asyncio.sleep(5)
        async with table.lease(B) as slot:
            with pytest.raises(StillLoadingError, match="b waits for memory: a is in use") as waiting:
                await slot.ready(3)
            assert waiting.value.retry_after_s
            assert slot.state == "waiting"
            await slot.ready(600)
        assert busy.done()


@in_virtual_time
async def test_a_model_that_is_asked_all_the_time_does_not_starve_another() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, _):

        async def always() -> None:
            while True:
                await ask(table, A, 2)

        others = [asyncio.create_task(always()) for _ in range(3)]
        await asyncio.sleep(10)
        async with asyncio.timeout(DRAIN_S + 2 + 2 * LOAD_S):
            await ask(table, B)
        before = asyncio.get_running_loop().time()
        await ask(table, A)
        assert asyncio.get_running_loop().time() - before < DRAIN_S + 3 * LOAD_S, "and the first is loaded again"
        for other in others:
            other.cancel()


@in_virtual_time
async def test_memory_that_never_becomes_free_is_a_clear_error_with_a_time_to_retry() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, _):
        busy = asyncio.create_task(ask(table, A, 10_000))
        await asyncio.sleep(5)
        with pytest.raises(StillLoadingError, match=r"b got no memory within \d+ s: a is in use") as refused:
            await ask(table, B)
        assert refused.value.retry_after_s
        assert asyncio.get_running_loop().time() < ROOM_LIMIT_S + 20
        busy.cancel()


@in_virtual_time
async def test_a_model_that_can_never_fit_is_refused_at_once() -> None:
    async with served(10, {"a": 6, "b": 11}) as (table, _):
        await ask(table, A)
        began = asyncio.get_running_loop().time()
        with pytest.raises(ModelError, match="b needs 11"):
            await ask(table, B)
        assert asyncio.get_running_loop().time() - began < 1
        assert loaded(table) == ["a"], "nothing was unloaded for it"


@in_virtual_time
async def test_a_pinned_model_stays_and_the_refusal_names_it() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, _):
        await ask(table, A, keep_alive_s=math.inf)
        with pytest.raises(ModelError, match="as a is kept for ever"):
            await ask(table, B)
        assert loaded(table) == ["a"]
        await ask(table, A, keep_alive_s=60)
        await ask(table, B)
        assert loaded(table) == ["b"]


@in_virtual_time
async def test_max_models() -> None:
    async with served(100, {}, max_models=2) as (table, _):
        for model in (A, B, C):
            await ask(table, model)
        assert loaded(table) == ["b", "c"]
        for model in (B, C):
            await ask(table, model, keep_alive_s=math.inf)
        with pytest.raises(ModelError, match="--max-models is 2, and b and c are kept for ever"):
            await ask(table, D)


@in_virtual_time
async def test_a_limit_holds_while_models_load() -> None:
    sizes = {"a": 300, "b": 300, "c": 300}
    async with served(10_000, sizes, limit=1060) as (table, engines):
        await asyncio.gather(*(ask(table, model, 3) for model in (A, B, C)))
        assert engines.machine.most <= 1060
        assert loaded(table) == ["a", "b", "c"], "with a ninth for conversations they fit"


@in_virtual_time
async def test_keep_alive_ends_a_model_in_time_and_polling_does_not_prolong_it() -> None:
    async with served(10, {}) as (table, _):
        await ask(table, A, keep_alive_s=30)
        await ask(table, B, keep_alive_s=0)
        for _ in range(20):
            await asyncio.sleep(1)
            assert [slot.model.name for slot in table.all_slots()] == ["a"]
            assert [slot.progress for slot in table.slots.values()] == [1.0]
        await asyncio.sleep(10)
        assert not table.all_slots()


@in_virtual_time
async def test_release_lets_a_busy_model_finish() -> None:
    async with served(10, {}) as (table, engines):
        busy = asyncio.create_task(ask(table, A, 20))
        await asyncio.sleep(5)
        assert table.release(A)
        assert not table.release(B)
        await asyncio.sleep(10)
        assert loaded(table) == ["a"]
        await busy
        await asyncio.sleep(0.1)
        assert not table.slots
        assert engines.processes[0].closed


@in_virtual_time
async def test_the_end_of_a_waiting_model_leaves_the_ending_of_its_victim_alone() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, engines):
        await ask(table, A)
        engines.processes[0].may_close.clear()
        waiting = asyncio.create_task(ask(table, B))
        await asyncio.sleep(1)
        await table.unload(table.slots[B.path])
        with pytest.raises(EdgeLMError, match="b is being unloaded"):
            await waiting
        engines.processes[0].may_close.set()
        await asyncio.sleep(1)
        assert table.all_slots() == []
        await ask(table, B)


@in_virtual_time
async def test_the_server_ends_while_a_model_makes_room() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, engines):
        await ask(table, A)
        engines.processes[0].may_close.clear()
        waiting = asyncio.create_task(ask(table, B))
        await asyncio.sleep(1)
        asyncio.get_running_loop().call_later(1, engines.processes[0].may_close.set)
        await table.close()  # fails if it waits for ever
        with pytest.raises(EdgeLMError, match="shutting down"):
            await waiting


@in_virtual_time
async def test_a_broken_model_that_loads_is_no_error_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = Machine.predict

    async def without_a(self: Machine, model: LocalModel, usable: int | None, freed: int = 0) -> Footprint:
        if model is A:
            raise ModelError("a is no GGUF")
        return await predict(self, model, usable, freed)

    monkeypatch.setattr(Machine, "predict", without_a)

    async with served(10, {"a": 4, "b": 4}) as (table, _):
        first = asyncio.create_task(ask(table, A))
        await asyncio.sleep(LOAD_S / 4)
        await ask(table, B)
        await first
        assert loaded(table) == ["a", "b"]


@in_virtual_time
async def test_a_model_that_fails_while_it_is_predicted_keeps_no_memory() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, engines):
        first = asyncio.create_task(ask(table, A))
        process = await engines.number(1)
        second = asyncio.create_task(ask(table, B))
        await asyncio.sleep(0.25)  # the prediction of `a` takes half a second
        process.fail(ModelError("a is no GGUF"))
        with pytest.raises(ModelError, match="no GGUF"):
            await first
        await second
        assert [slot.model.name for slot in table.engines()] == ["b"]


@in_virtual_time
async def test_nobody_is_unloaded_for_a_client_that_has_left() -> None:
    async with served(10, {"a": 6, "b": 6}) as (table, _):
        busy = asyncio.create_task(ask(table, A, 200))
        await asyncio.sleep(5)
        left = asyncio.create_task(ask(table, B))
        await asyncio.sleep(2)
        left.cancel()
        await busy
        await asyncio.sleep(1)
        assert loaded(table) == []  # it was asked to end when the other waited too long
        assert [slot.model.name for slot in table.all_slots()] == []


async def time_until_loaded(table: EngineTable, model: LocalModel, seconds: float = 1.0) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with table.lease(model) as slot:
        await slot.ready(600)
        took_s = loop.time() - began
        await asyncio.sleep(seconds)
    return took_s


@pytest.mark.parametrize(
    "bound", [pytest.param({"total": 10}, id="memory"), pytest.param({"total": 100, "limit": 12}, id="limit")]
)
@in_virtual_time
async def test_a_model_that_fits_does_not_wait_behind_one_that_does_not(bound: dict[str, int]) -> None:
    async with served(sizes={"a": 6, "b": 6, "c": 2}, **bound) as (table, _):
        busy = asyncio.create_task(ask(table, A, 100))
        await asyncio.sleep(5)
        waiting = asyncio.create_task(ask(table, B))
        await asyncio.sleep(1)
        assert await time_until_loaded(table, C) < LOAD_S + 3
        assert not busy.done()
        assert table.slots[B.path].state == "waiting"
        await waiting


@in_virtual_time
async def test_models_that_go_ahead_leave_the_memory_that_the_first_one_waits_for() -> None:
    """`b` needs all that `a` frees but 2 bytes: one small model may take these, and others not what is free too."""
    async with served(10, {"a": 6, "b": 8, "c": 2, "d": 2}) as (table, _):
        busy = asyncio.create_task(ask(table, A, 40))
        await asyncio.sleep(5)
        first = asyncio.create_task(time_until_loaded(table, B))
        await asyncio.sleep(1)
        others = [asyncio.create_task(ask(table, model, 1000)) for model in (C, D)]
        await asyncio.sleep(20)
        assert loaded(table) == ["c"], "and `a` gets no more requests"
        assert table.slots[D.path].blocker == "b came first"
        await busy
        assert await first < 40 + 2 * LOAD_S
        for other in others:
            other.cancel()


@in_virtual_time
async def test_a_stream_of_small_models_starves_no_big_one() -> None:
    small = [model_called(f"s{number}") for number in range(12)]
    async with served(20, {"a": 9, "b": 15, **{model.name: 3 for model in small}}) as (table, _):
        busy = asyncio.create_task(ask(table, A, 30))
        await asyncio.sleep(5)
        first = asyncio.create_task(time_until_loaded(table, B))
        others = []
        for model in small:
            await asyncio.sleep(3)
            others.append(asyncio.create_task(ask(table, model, 500)))
        await busy
        assert await first < 30 + 3 * LOAD_S
        for other in others:
            other.cancel()


@in_virtual_time
async def test_no_model_goes_ahead_of_one_that_waits_only_for_the_end_of_a_load() -> None:
    """Each one that loads would prolong the wait, and others could follow it for ever."""
    async with served(18, {"a": 4, "b": 12, "c": 1}) as (table, engines):
        asked = []
        for model in (A, B, C):
            asked.append(asyncio.create_task(ask(table, model)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*asked)
        assert engines.models == ["a", "b", "c"]


@in_virtual_time
async def test_a_model_that_goes_ahead_leaves_a_place_under_max_models() -> None:
    async with served(20, {"a": 6, "b": 6, "c": 12, "d": 1, "e": 1}, max_models=3) as (table, _):
        busy = [asyncio.create_task(ask(table, model, 30)) for model in (A, B)]
        await asyncio.sleep(5)
        first = asyncio.create_task(time_until_loaded(table, C, 100))
        await asyncio.sleep(1)
        ahead = asyncio.create_task(time_until_loaded(table, D, 100))
        await asyncio.sleep(1)
        later = asyncio.create_task(time_until_loaded(table, model_called("e")))
        await asyncio.sleep(10)
        assert [slot.model.name for slot in table.engines()] == ["b", "d", "a"]
        assert await first < 30 + 2 * LOAD_S
        assert await ahead < LOAD_S + 3
        assert await later < 60
        await asyncio.gather(*busy)


@in_virtual_time
async def test_a_model_that_can_never_fit_is_refused_while_another_one_waits() -> None:
    async with served(10, {"a": 6, "b": 6, "c": 11}) as (table, _):
        busy = asyncio.create_task(ask(table, A, 100))
        await asyncio.sleep(5)
        waiting = asyncio.create_task(ask(table, B))
        await asyncio.sleep(1)
        with pytest.raises(ModelError, match="c needs 11"):
            await ask(table, C)
        assert not busy.done()
        await waiting


@in_virtual_time
async def test_an_engine_that_crashes_as_it_ends_leaves_its_place_to_the_next_one_at_once() -> None:
    """Requests that it had not taken yet are told to try again: they would wait until the next one has ended."""
    async with served(10, {"a": 6, "b": 6}) as (table, engines):
        async with table.lease(A) as slot:
            await slot.ready(600)
            asked = [asyncio.create_task(ask(table, B, 30))]
            await asyncio.sleep(DRAIN_S + 3)
            assert slot.is_leaving
            asked.append(asyncio.create_task(ask(table, A, 500)))
            await asyncio.sleep(2)
            engines.living["a"].die()
            began = slot.now()
            with pytest.raises(StillLoadingError, match="a has ended to make room; try again"):
                await slot.ready(600)
            assert slot.now() - began < 10
        await asyncio.gather(*asked)
        assert engines.models == ["a", "b", "a"]


# -- llama.cpp's layers on a GPU ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_model_on_the_gpu_makes_room_for_another_one_there() -> None:
    """Main memory is ample: only the GPU is short."""
    async with with_card({"a": 1, "b": 1, "c": 1}, {"a": 6, "b": 6, "c": 3}, 10) as (table, engines):
        for model in (A, C, B):
            await ask(table, model)
        assert loaded(table) == ["b", "c"]
        planned = engines.promised["b"]
        assert planned is not None
        assert planned.offloaded_bytes == 6, "and not the 1 that was free"


@in_virtual_time
async def test_a_model_that_waits_for_the_gpu_waits_for_those_that_have_it() -> None:
    async with with_card({"a": 1, "b": 1, "c": 50}, {"a": 6, "b": 6}, 10) as (table, _):
        busy = asyncio.create_task(ask(table, A, 20))
        idle = asyncio.create_task(ask(table, C))
        await asyncio.sleep(2 * LOAD_S + 2)
        async with table.lease(B) as slot:
            with pytest.raises(StillLoadingError, match="a is in use"):
                await slot.ready(3)
            await slot.ready(600)
        assert loaded(table) == ["b", "c"], "the end of c would have freed nothing of the GPU"
        await asyncio.gather(busy, idle)


@in_virtual_time
async def test_a_pinned_model_leaves_a_part_of_the_gpu_to_another_one() -> None:
    async with with_card({"a": 1, "b": 1}, {"a": 6, "b": 6}, 10) as (table, engines):
        await ask(table, A, keep_alive_s=math.inf)
        await ask(table, B)
        planned = engines.promised["b"]
        assert planned is not None
        assert (planned.offloaded_bytes, planned.total_bytes) == (4, 3)
        assert loaded(table) == ["a", "b"]


@in_virtual_time
async def test_two_loads_at_once_are_not_promised_the_same_bytes_of_the_gpu() -> None:
    async with with_card({"a": 1, "b": 1, "c": 1}, {"a": 6, "b": 6, "c": 4}, 10) as (table, engines):
        await ask(table, C, keep_alive_s=1)
        await asyncio.gather(ask(table, A, 5), ask(table, B, 5))
        assert engines.host.gpu_free >= 0
        assert loaded(table) == ["b"]


@in_virtual_time
async def test_main_memory_is_made_free_by_models_that_have_it() -> None:
    """The one on the GPU was used least recently, and its end would free 1 of main memory."""
    async with with_card({"a": 1, "b": 60, "c": 60}, {"a": 6}, 10) as (table, _):
        for model in (A, B, C):
            await ask(table, model)
        assert loaded(table) == ["a", "c"]


@in_virtual_time
async def test_a_gpu_that_nothing_measures_bounds_nothing() -> None:
    async with with_card({"a": 1, "b": 1}, {"a": 6, "b": 6}, None) as (table, _):
        for model in (A, B):
            await ask(table, model)
        assert loaded(table) == ["a", "b"]


@in_virtual_time
async def test_our_kernels_get_a_gpu_of_their_own_size() -> None:
    """Two GPUs of 10: two models of 6 lie on one each, and a third one takes the place of the first."""

    class Host(FakeHost):
        def __init__(self) -> None:
            super().__init__()
            self.free = [10, 10]

        async def predict(self, model: LocalModel, usable_bytes: int | None, freed_gpu_bytes: int = 0) -> Footprint:
            return footprint(6, device="cuda")

        async def measure(self, pids: Collection[int]) -> Measured:
            return replace(
                await super().measure(pids), gpu_free_bytes=sum(self.free), one_gpu_free_bytes=max(self.free)
            )

    class Ours(Launches):
        async def __call__(self, model: LocalModel, planned: Footprint | None) -> FakeProcess:
            process = await super().__call__(model, planned)
            card = host.free.index(max(host.free))
            host.free[card] -= 6

            def ended() -> None:
                host.free[card] += 6

            process.on_end = ended
            asyncio.get_running_loop().call_later(LOAD_S, process.load)
            return process

    host = Host()

    async with EngineTable(Ours(), host) as table:
        for model in (A, B, C):
            await ask(table, model)
        assert loaded(table) == ["b", "c"]


class Table(RuleBasedStateMachine):
    """Requests for models of different sizes, engines that crash, and time that passes.

    The first that waits for memory gets it when the busy engines have answered: those that go ahead never prolong it.
    """

    @initialize(
        sizes=st.lists(st.integers(10, 60), min_size=3, max_size=6),
        limited=st.booleans(),
        max_models=st.sampled_from([None, None, 2, 3]),
    )
    def begin(self, sizes: list[int], limited: bool, max_models: int | None) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.models = [model_called(f"m{number}") for number in range(len(sizes))]
        self.budget = 200
        total = 10_000 if limited else self.budget
        # Without a limit an engine that loads alone is promised no pages of its file: the system can drop these.
        self.pages = 0 if limited else (PEAK - 1) * max(sizes)
        machine = Machine(total, dict(zip((model.name for model in self.models), sizes, strict=True)))
        self.engines = Engines(machine)
        self.table = EngineTable(
            self.engines,
            machine,
            idle_timeout_s=300,
            limit_bytes=self.budget if limited else None,
            max_models=max_models,
        )
        self.max_models = max_models
        self.requests: list[asyncio.Task[None]] = []
        self.pinned: set[str] = set()
        self.crashed: set[str] = set()
        self.problems: list[str] = []
        self.loop.run_until_complete(self.table.__aenter__())
        self.watch()

    def watch(self) -> None:
        """Check each engine that ends for another model."""
        unload = self.table.memory._unload

        async def checked(victim: EngineSlot) -> None:
            idle = [slot for slot in self.table.slots.values() if slot.is_idle and not slot.pinned]
            if victim.leases or victim.pinned:
                self.problems.append(f"{victim.model.name} is in use or pinned, and was unloaded")
            if any(slot.idle_s > victim.idle_s for slot in idle):
                self.problems.append(f"{victim.model.name} was used later than another one")
            await unload(victim)

        self.table.memory._unload = checked
        attempt, since = self.table.memory._admit_first, dict[asyncio.Task[Any] | None, float]()

        async def timed(slot: EngineSlot, *, drains: bool) -> str:
            task, reason = asyncio.current_task(), ""
            began = since.pop(task, self.loop.time())
            try:
                reason = await attempt(slot, drains=drains)
            finally:
                if self.loop.time() - began > LONGEST_S:
                    self.problems.append(f"{slot.model.name} waited for {self.loop.time() - began:.0f} s: {reason}")
            if reason:
                since[task] = began
            return reason

        self.table.memory._admit_first = timed  # type: ignore[method-assign]

    async def request(self, model: LocalModel, seconds: float, keep_alive_s: float | None) -> None:
        async with self.table.lease(model, keep_alive_s) as slot:
            process = await slot.ready(600)
            assert isinstance(process, FakeProcess)
            await asyncio.sleep(seconds)
            if process.closed and not process.crashed:
                self.problems.append(f"{model.name} was closed during a request")

    @rule(
        number=st.integers(0, 5),
        seconds=st.floats(0, 30),
        keep_alive_s=st.sampled_from([None, None, None, 0.0, 5.0, 60.0]),
    )
    def ask(self, number: int, seconds: float, keep_alive_s: float | None) -> None:
        model = self.models[number % len(self.models)]
        if keep_alive_s is not None:
            self.pinned.discard(model.name)
        self.requests.append(self.loop.create_task(self.request(model, seconds, keep_alive_s)))

    @precondition(lambda self: not self.pinned)
    @rule(number=st.integers(0, 5))
    def pin(self, number: int) -> None:
        model = self.models[number % len(self.models)]
        task = self.loop.create_task(self.request(model, 1.0, math.inf))
        self.loop.run_until_complete(asyncio.wait({task}))
        if not task.exception():
            self.pinned.add(model.name)

    @rule(seconds=st.floats(0.1, 60))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @precondition(lambda self: self.engines.living)
    @rule(number=st.integers(0, 5))
    def crash(self, number: int) -> None:
        name, process = sorted(self.engines.living.items())[number % len(self.engines.living)]
        process.crashed = True
        self.crashed.add(name)  # its memory may be gone when it restarts
        process.die()
        self.loop.run_until_complete(asyncio.sleep(0))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engines"):
            return
        assert not self.problems, self.problems
        assert not self.engines.twins, "two engines of one model"
        assert self.engines.machine.most <= self.budget + self.pages, "more memory was taken than there is"
        assert self.max_models is None or len(self.engines.living) <= self.max_models
        for name in self.pinned - self.crashed:
            assert any(slot.model.name == name for slot in self.table.slots.values()), f"{name} is pinned and gone"

    def teardown(self) -> None:
        if not hasattr(self, "engines"):
            return
        try:
            if self.requests:
                self.loop.run_until_complete(asyncio.wait(self.requests, timeout=20 * ROOM_LIMIT_S))
            assert all(task.done() for task in self.requests), "a request never ended"
            self.holds()
            for task in self.requests:
                if error := task.exception():
                    assert isinstance(error, EdgeLMError), error
                    busy_for_long = isinstance(error, StillLoadingError)
                    assert busy_for_long or self.pinned or "died" in str(error), error
        finally:  # also of an example that fails: its tasks would be destroyed while they are pending
            self.loop.run_until_complete(self.table.close())
            living = list(self.engines.living)
            for task in self.requests:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*self.requests, return_exceptions=True))
            asyncio.set_event_loop(None)
            self.loop.close()
        assert not living


def test_any_requests_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROOM_LIMIT_S", 60.0)  # fewer looks at the clock
    monkeypatch.setattr(memory, "POLL_S", 5.0)
    run_state_machine_as_test(Table, settings=settings(max_examples=EXAMPLES, stateful_step_count=20, deadline=None))
