"""The engine from the outside: streams, cancellation, failures, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import aclosing, contextmanager

import pytest

from edgelm.base.errors import BusyError, EngineError, RequestError
from edgelm.engine.clock import StepClock
from edgelm.engine.core import LAST, Drafter, Embedder, Event, KVCache, SamplingParams, Sequence, Step
from edgelm.engine.engine import Engine
from edgelm.engine.kv_paged import BLOCK_LEN, PagedKV
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.stream import Stream
from tests.engine.fake import (
    FakeExecutor,
    FakeMatcher,
    Fault,
    InjectedError,
    PagedMemory,
    SimpleDrafter,
    SlotMemory,
    complete_alone,
    info,
)

ENDLESS = SamplingParams(temperature=0)  # the context would take hours to fill


class GatedExecutor(FakeExecutor):
    """A fake that waits at the start of a step while its gate is closed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = threading.Event()
        self.gate.set()
        self.closes_after: int | None = None  # steps, then the gate is closed
        self.ahead: list[int] = []  # numbers of the steps
        self.ran: list[list[int]] = []  # the sequences of each step

    def forward(self, step: Step) -> None:
        if self.num_steps == self.closes_after:
            self.gate.clear()
        assert self.gate.wait(60)
        if any(chunk.tokens == [LAST] for chunk in step.chunks):
            self.ahead.append(self.num_steps)
        self.ran.append([chunk.seq.id for chunk in step.chunks])
        super().forward(step)


@contextmanager
def running_engine(
    max_requests: int = 512,
    drafter: Drafter | None = None,
    make_embedder: Callable[[], Embedder] | None = None,
    **facts: object,
) -> Iterator[tuple[Engine, GatedExecutor]]:
    parsed = info(**({"context": 100_000, "capacity": 200_000} | facts))
    kv: KVCache = PagedKV(parsed) if parsed.runs_ahead else SlotKV(parsed, 10**6)
    memory = PagedMemory(parsed, BLOCK_LEN) if parsed.runs_ahead else SlotMemory(parsed, 10**6)
    executor = GatedExecutor(parsed, memory)
    clock = StepClock()
    scheduler = Scheduler(parsed, kv, clock, drafter)
    engine = Engine(executor, scheduler, clock, max_requests, make_embedder).start()
    try:
        yield engine, executor
    finally:
        executor.gate.set()
        engine.close()
        assert executor.closed


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


async def events_of(stream: Stream) -> list[Event]:
    return [event async for event in stream]


def ids_of(events: list[Event]) -> list[int]:
    return [sample.id for event in events for sample in event.sampled]


async def emptied(engine: Engine) -> None:
    """Wait until no request is open."""
    async with asyncio.timeout(60):
        while engine.num_requests:  # noqa: ASYNC110 - the engine tells nobody that it is idle
            await asyncio.sleep(0.001)


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_a_stream_gives_the_answer_token_by_token_and_ends_with_its_cost() -> None:
    with running_engine() as (engine, executor):
        events = await events_of(engine.submit([1, 2, 3], greedy(9)))
        assert ids_of(events) == complete_alone([1, 2, 3], greedy(9), executor.info)[0]
        assert [event.finish_reason for event in events] == [None] * 8 + ["length"]
        assert [event.stats is not None for event in events] == [False] * 8 + [True]


async def test_many_streams_at_once_give_each_its_own_answer() -> None:
    with running_engine() as (engine, executor):
        prompts = [[number % 40] * (1 + 7 * number % 90) for number in range(60)]
        params = [SamplingParams(max_tokens=1 + 5 * number % 40, seed=number) for number in range(60)]
        streams = [engine.submit(*request) for request in zip(prompts, params, strict=True)]
        answers = await asyncio.gather(*(events_of(stream) for stream in streams))
        for prompt, request_params, events in zip(prompts, params, answers, strict=True):
            assert ids_of(events) == complete_alone(prompt, request_params, executor.info)[0]
        assert engine.num_requests == 0


async def test_running_ahead_changes_no_answer() -> None:
    with running_engine(runs_ahead=True) as (engine, executor):
        requests = [
            ([number % 40] * (1 + 7 * number % 90), SamplingParams(max_tokens=1 + 5 * number % 40, seed=number))
            for number in range(60)
        ]
        requests += [([7, 3], SamplingParams(seed=number, stop_ids=frozenset({1, 2, 3}))) for number in range(20)]
        answers = await asyncio.gather(*(events_of(engine.submit(*request)) for request in requests))
        for (prompt, params), events in zip(requests, answers, strict=True):
            expected, reason = complete_alone(prompt, params, executor.info)
            assert ids_of(events) == expected
            assert events[-1].finish_reason == reason
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(expected) - 1)
        assert len(executor.ahead) > 100
        assert engine.num_requests == 0


@pytest.mark.parametrize("where", ["chunks", "sample", "read"])
@pytest.mark.parametrize("number", [0, 1, 5, 6])
async def test_a_step_that_fails_fails_its_requests_and_no_other(where: str, number: int) -> None:
    """A launch ahead that fails ends no request: it is tried again after the step before it is read."""
    with running_engine(runs_ahead=True, max_sequences=2) as (engine, executor):
        executor.faults[number] = Fault(where)  # type: ignore[arg-type]
        streams = [engine.submit([first, 1], greedy(30)) for first in range(2)]
        late = engine.submit([9, 9], greedy(12))
        num_failed = 0
        for first, stream in enumerate(streams):
            answer: list[int] = []
            try:
                async for event in stream:
                    answer += ids_of([event])
            except EngineError:
                num_failed += 1
            expected, _ = complete_alone([first, 1], greedy(30), executor.info)
            assert answer == expected[: len(answer)]
        assert (num_failed > 0) == (where == "read" or number not in executor.ahead)
        events = await events_of(late)
        assert ids_of(events) == complete_alone([9, 9], greedy(12), executor.info)[0]
        again = await events_of(engine.submit([9, 9], greedy(12)))
        assert ids_of(again) == ids_of(events)


async def test_a_failed_step_after_the_end_fails_no_request() -> None:
    answer, _ = complete_alone([6, 5], greedy(20), info(context=100_000))
    end = next(place for place, token in enumerate(answer) if place >= 3 and token not in answer[:place])
    params = SamplingParams(temperature=0, stop_ids=frozenset({answer[end]}))
    with running_engine(runs_ahead=True) as (engine, executor):
        executor.faults[end + 1] = Fault("read")
        events = await events_of(engine.submit([6, 5], params))
        assert ids_of(events) == answer[: end + 1]
        assert events[-1].finish_reason == "stop"
        again = await events_of(engine.submit([6, 5], params))
        assert ids_of(again) == answer[: end + 1]
        assert executor.num_steps > end + 2


@pytest.mark.parametrize(
    ("runs_ahead", "expected"), [(True, [(8, 32), (1, 0)]), (False, [(16, 0)] * 2 + [(8, 0), (1, 0)])]
)
async def test_unread_prefill_is_counted_with_the_next_step_that_is_read(
    runs_ahead: bool, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        StepClock, "observe", lambda _, step, seconds, unread=0: observed.append((step.num_tokens, unread))
    )
    with running_engine(runs_ahead=runs_ahead, max_tokens=16, max_rows=16) as (engine, _):
        await events_of(engine.submit(list(range(40)), greedy(2)))
    assert observed == expected


async def test_leaving_while_a_step_is_running() -> None:
    with running_engine(runs_ahead=True) as (engine, executor):
        for _ in range(20):
            stream = engine.submit([4, 2], ENDLESS)
            async with aclosing(stream):
                async for _ in stream:
                    break
            answer = await events_of(engine.submit([1, 2, 3], greedy(9)))
            assert ids_of(answer) == complete_alone([1, 2, 3], greedy(9), executor.info)[0]
        await emptied(engine)
        assert len(executor.ahead) > 20


async def test_a_grammar_masks_what_is_sampled() -> None:
    with running_engine() as (engine, executor):
        events = await events_of(engine.submit([1, 2], greedy(20), FakeMatcher(5, 40)))
        assert ids_of(events) == complete_alone([1, 2], greedy(20), executor.info, grammar=5)[0]


async def test_a_timeout_between_events_loses_none() -> None:
    """A server that sends keep-alives while it waits continues with the same stream."""
    with running_engine() as (engine, executor):
        executor.gate.clear()
        stream = engine.submit([1], greedy(5))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        executor.gate.set()
        assert len(ids_of(await events_of(stream))) == 5


# -- leaving -----------------------------------------------------------------------------------------------------------


async def test_leaving_a_loop_over_a_stream_cancels_the_request() -> None:
    with running_engine() as (engine, _):
        async for event in engine.submit([1], ENDLESS):
            assert event.finish_reason is None
            break
        await emptied(engine)


async def test_a_request_ends_with_the_step_during_which_its_client_leaves() -> None:
    with running_engine() as (engine, executor):
        for _ in range(20):
            stream = engine.submit([5], ENDLESS)
            await anext(stream)
            executor.gate.clear()  # the next step waits
            stream.close()
            num_steps = executor.num_steps
            executor.gate.set()
            await emptied(engine)
            assert executor.num_steps - num_steps <= 1


async def test_closing_a_stream_that_is_still_held_cancels_the_request() -> None:
    with running_engine() as (engine, _):
        async with aclosing(engine.submit([1], ENDLESS)) as stream:
            await anext(stream)
        await emptied(engine)
        assert await events_of(stream) == []


async def test_cancelling_the_task_cancels_the_request() -> None:
    with running_engine() as (engine, _):
        task = asyncio.create_task(events_of(engine.submit([1], ENDLESS)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await emptied(engine)


async def test_dropping_a_stream_cancels_the_request() -> None:
    with running_engine() as (engine, _):
        stream = engine.submit([1], ENDLESS)
        await anext(stream)
        dropped = weakref.ref(stream)
        del stream
        gc.collect()
        assert dropped() is None, "the engine does not hold it"
        await emptied(engine)


async def test_leaving_while_waiting_in_the_queue() -> None:
    with running_engine(max_sequences=1) as (engine, executor):
        first = engine.submit([1], ENDLESS)
        await anext(first)
        engine.submit([2], ENDLESS).close()
        third = engine.submit([3], greedy(4))
        first.close()
        assert ids_of(await events_of(third)) == complete_alone([3], greedy(4), executor.info)[0]
        await emptied(engine)


async def test_stopping_in_the_middle_returns_the_stats() -> None:
    with running_engine() as (engine, _):
        stream = engine.submit([1, 2], ENDLESS)
        for _ in range(3):
            await anext(stream)
        stats = await stream.stop()
        assert stats.prompt_tokens == 2
        assert stats.completion_tokens >= 3
        await emptied(engine)


async def test_stopping_at_the_end_returns_the_stats_of_the_last_event() -> None:
    with running_engine() as (engine, _):
        stream = engine.submit([1, 2], greedy(3))
        events = await events_of(stream)
        async with asyncio.timeout(60):
            assert await stream.stop() == await stream.stop() == events[-1].stats


# -- refusals ----------------------------------------------------------------------------------------------------------


async def test_too_many_requests_are_refused_until_one_is_done() -> None:
    with running_engine(max_requests=4) as (engine, executor):
        executor.gate.clear()
        first, second = engine.submit([1], greedy(2)), engine.submit([2], greedy(2))
        with pytest.raises(BusyError, match="2 requests of this client"):
            engine.submit([3], greedy(2))
        executor.gate.set()
        await events_of(first)
        await events_of(engine.submit([3], greedy(2)))
        await events_of(second)


async def test_clients_that_flood_the_queue_leave_room_for_others() -> None:
    with running_engine(max_requests=12) as (engine, executor):
        executor.gate.clear()
        taken: list[Stream] = []
        for client, room in (("a", 6), ("b", 3), ("c", 2), ("d", 1)):
            taken += [engine.submit([1], greedy(2), client=client) for _ in range(room)]
            if len(taken) < 12:
                with pytest.raises(BusyError, match=f"{room} requests? of this client"):
                    engine.submit([1], greedy(2), client=client)
        with pytest.raises(BusyError, match="12 requests are open"):
            engine.submit([1], greedy(2), client="e")
        executor.gate.set()
        for stream in taken:
            assert len(ids_of(await events_of(stream))) == 2
        assert engine.num_requests == 0


async def test_a_short_request_of_another_client_is_not_behind_a_flood() -> None:
    with running_engine(max_sequences=1) as (engine, executor):
        executor.gate.clear()
        flood = [engine.submit([1, 2, 3], greedy(200), client="a") for _ in range(100)]
        short = engine.submit([4], greedy(4), client="b")
        marked = engine.submit([5], greedy(100), client="c", interactive=True)
        executor.closes_after = 200 + 4 + 200 + 100 + 20  # one of the flood before each of them, at most
        executor.gate.set()
        async with asyncio.timeout(50):
            for stream in (short, marked):
                async for event in stream:
                    last = event
                assert last.finish_reason == "length"
        executor.closes_after = None
        executor.gate.set()
        for stream in flood:
            stream.close()
        await emptied(engine)


@pytest.mark.parametrize("interactive", [False, True])
async def test_a_marked_request_overtakes_a_long_answer_of_the_same_client(interactive: bool) -> None:
    with running_engine(max_sequences=1) as (engine, executor):
        executor.gate.clear()
        agent = engine.submit([1, 2, 3], greedy(200))
        marked = engine.submit([4], greedy(100), interactive=interactive)
        executor.gate.set()
        assert len(ids_of(await events_of(agent))) == 200
        assert len(ids_of(await events_of(marked))) == 100
        assert executor.ran[-1] == [0 if interactive else 1]


async def test_a_prompt_that_can_never_run_is_refused_with_both_numbers() -> None:
    with running_engine(context=50) as (engine, _):
        with pytest.raises(RequestError, match=r"60 tokens.* 50"):
            engine.submit([1] * 60, greedy(2))
        with pytest.raises(RequestError, match="empty"):
            engine.submit([], greedy(2))
        assert engine.num_requests == 0


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_a_failed_step_fails_its_requests_and_nothing_else() -> None:
    with running_engine(max_sequences=1) as (engine, executor):
        executor.faults = {2: Fault("sample")}
        first, second = engine.submit([1], greedy(9)), engine.submit([2], greedy(9))
        seen = [await anext(first), await anext(first)]
        with pytest.raises(EngineError, match="a fault was injected"):
            await anext(first)
        assert ids_of(seen) == complete_alone([1], greedy(2), executor.info)[0]
        assert ids_of(await events_of(second)) == complete_alone([2], greedy(9), executor.info)[0]
        assert (await first.stop()).completion_tokens == 2
        again = await events_of(engine.submit([1], greedy(9)))
        assert ids_of(again) == complete_alone([1], greedy(9), executor.info)[0]


async def test_a_bug_in_a_step_fails_its_requests_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    with running_engine() as (engine, executor):
        executor.faults = {0: Fault("chunks", 0, InjectedError)}
        with pytest.raises(EngineError, match="InjectedError: a fault was injected"):
            await events_of(engine.submit([1], greedy(9)))
        assert "a step failed" in caplog.text
        assert len(ids_of(await events_of(engine.submit([1], greedy(9))))) == 9


async def test_a_grammar_that_fails_leaves_the_engine_usable() -> None:
    with running_engine() as (engine, _):
        with pytest.raises(EngineError, match="InjectedError"):
            await events_of(engine.submit([1], greedy(9), FakeMatcher(3, 40, raises_at=4)))
        assert len(ids_of(await events_of(engine.submit([1], greedy(9))))) == 9


async def test_nan_is_an_error_of_the_request() -> None:
    with running_engine() as (engine, executor):
        executor.spoiled = {0: 2}
        stream = engine.submit([1], greedy(9))
        seen = [await anext(stream), await anext(stream)]
        with pytest.raises(EngineError, match="not numbers"):
            await anext(stream)
        assert len(ids_of(seen)) == 2
        await emptied(engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_outside_a_step_leaves_no_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as (engine, executor):
        executor.gate.clear()
        stream, other = engine.submit([1], ENDLESS), engine.submit([2], ENDLESS)

        def broken(self: Scheduler, seq_id: int) -> None:
            raise InjectedError

        monkeypatch.setattr(Scheduler, "abort", broken)
        stream.close()
        executor.gate.set()
        with pytest.raises(EngineError, match="closed"):
            async with asyncio.timeout(60):
                await events_of(other)
        with pytest.raises(EngineError, match="closed"):
            engine.submit([1], ENDLESS)


# -- closing -----------------------------------------------------------------------------------------------------------


async def test_closing_ends_every_stream_with_an_error() -> None:
    with running_engine(max_sequences=2) as (engine, executor):
        streams = [engine.submit([token], ENDLESS) for token in range(4)]
        await anext(streams[0])
        engine.close()
        for stream in streams:
            with pytest.raises(EngineError, match="closed"):
                await events_of(stream)
        with pytest.raises(EngineError, match="closed"):
            engine.submit([1], ENDLESS)
        assert executor.closed
        assert engine.num_requests == 0
        engine.close()
    assert not any(thread.name == "engine" for thread in threading.enumerate())


def test_closing_an_engine_that_never_started_ends_its_streams() -> None:
    facts = info()
    executor = FakeExecutor(facts, SlotMemory(facts, 0))
    clock = StepClock()
    engine = Engine(executor, Scheduler(facts, SlotKV(facts, 0), clock), clock)

    async def use() -> None:
        stream = engine.submit([1], ENDLESS)
        engine.close()
        with pytest.raises(EngineError):
            await anext(stream)

    asyncio.run(use())
    assert executor.closed


def test_requests_of_a_loop_that_was_closed_end_and_others_go_on() -> None:
    with running_engine() as (engine, executor):
        held: list[Stream] = []

        async def leave() -> None:
            held.append(engine.submit([1], ENDLESS))
            await anext(held[0])

        async def stay() -> list[Event]:
            events = await events_of(engine.submit([2], greedy(5)))
            await emptied(engine)
            return events

        asyncio.run(leave())
        assert ids_of(asyncio.run(stay())) == complete_alone([2], greedy(5), executor.info)[0]


def test_submitting_outside_an_event_loop_is_an_error() -> None:
    with running_engine() as (engine, _):
        with pytest.raises(RuntimeError, match="no running event loop"):
            engine.submit([1], ENDLESS)
        assert engine.num_requests == 0


# -- timings -----------------------------------------------------------------------------------------------------------


async def test_the_times_of_a_request_add_up() -> None:
    with running_engine(max_tokens=16) as (engine, _):
        (*_, last) = await events_of(engine.submit([1] * 100, greedy(10)))
        stats = last.stats
        assert stats
        assert min(stats.queue_ms, stats.prompt_ms, stats.decode_ms) >= 0
        assert stats.queue_ms + stats.prompt_ms == pytest.approx(stats.first_token_ms)
        assert stats.prompt_ms > 0
        assert stats.decode_ms > 0
        assert stats.decode_tokens_per_second == pytest.approx(9_000 / stats.decode_ms)
        assert (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens) == (100, 0, 10)


async def test_time_in_the_queue_is_not_time_of_the_prompt() -> None:
    with running_engine(max_sequences=1) as (engine, executor):
        executor.gate.clear()
        first, second = engine.submit([1], greedy(2)), engine.submit([2], greedy(1))
        await asyncio.sleep(0.1)
        executor.gate.set()
        await events_of(first)
        stats = (await events_of(second))[-1].stats
        assert stats
        assert stats.queue_ms >= 90, "it waited for the first"
        assert stats.decode_ms == 0
        assert stats.decode_tokens_per_second == 0


async def test_a_request_that_never_started_spent_its_time_in_the_queue() -> None:
    with running_engine(max_sequences=1) as (engine, executor):
        executor.gate.clear()
        first, second = engine.submit([1], greedy(2)), engine.submit([2], ENDLESS)
        second.close()
        executor.gate.set()
        await events_of(first)
        stats = await second.stop()
        assert stats.completion_tokens == 0
        assert stats.prompt_ms == 0
        assert stats.queue_ms == pytest.approx(stats.first_token_ms)


async def test_cached_and_drafted_tokens_are_counted() -> None:
    class Right(SimpleDrafter):
        def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
            answer, _ = complete_alone(seq.tokens[: seq.prompt_len], seq.params, info(context=100_000))
            return answer[seq.completion_len :][:3]

    with running_engine(drafter=Right()) as (engine, _):
        first = await events_of(engine.submit([3, 1], greedy(10)))
        prompt = [3, 1, *ids_of(first), 7]
        second = (await events_of(engine.submit(prompt, greedy(3))))[-1].stats
        assert first[-1].stats
        assert second
        assert (first[-1].stats.drafted, first[-1].stats.accepted) == (6, 6)
        assert len(first) == 1 + 1 + 2  # the prompt's token, two steps with a draft of three, the last token
        assert second.cached_tokens == 11


# -- time limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_an_answer_ends_when_its_time_is_over(runs_ahead: bool) -> None:
    with running_engine(runs_ahead=runs_ahead) as (engine, executor):
        other = asyncio.create_task(events_of(engine.submit([5, 6], greedy(200))))
        events = await events_of(engine.submit([1, 2, 3], ENDLESS, limit_s=0.02))
        assert events[-1].finish_reason == "length"
        assert events[-1].stats
        assert events[-1].stats.completion_tokens == len(ids_of(events))
        assert ids_of(events) == complete_alone([1, 2, 3], greedy(len(ids_of(events))), executor.info)[0]
        assert len(ids_of(await other)) == 200
        assert engine.num_requests == 0


async def test_the_time_of_an_answer_begins_with_its_first_token() -> None:
    with running_engine() as (engine, executor):
        executor.gate.clear()
        task = asyncio.create_task(events_of(engine.submit([1, 2, 3], greedy(4), limit_s=0.2)))
        await asyncio.sleep(0.4)
        executor.gate.set()
        assert ids_of(await task)


async def test_a_limit_of_no_time_gives_one_token() -> None:
    with running_engine() as (engine, _):
        assert len(ids_of(await events_of(engine.submit([1, 2, 3], ENDLESS, limit_s=0.0)))) == 1


async def test_a_request_that_waits_for_the_prompt_of_another_does_not_wait_for_its_answer() -> None:
    """Steps are launched ahead while it waits."""
    with running_engine(runs_ahead=True) as (engine, executor):
        executor.gate.clear()
        before = engine.submit([5], greedy(1))
        await asyncio.sleep(0.05)  # its step runs, so that the next two are planned together
        first = engine.submit([1, 2, 3] * 40, ENDLESS)
        second = asyncio.create_task(events_of(engine.submit([1, 2, 3] * 40 + [4], greedy(5))))
        await asyncio.sleep(0)
        executor.gate.set()
        async with asyncio.timeout(60):
            assert len(ids_of(await second)) == 5
        first.close()
        assert ids_of(await events_of(before))
