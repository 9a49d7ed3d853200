"""The counts of an engine, and the cost of a request with several sequences."""

from __future__ import annotations

import asyncio
import math

import pytest

from edgelm.base.errors import EngineError
from edgelm.engine.core import SamplingParams, Sequence
from edgelm.engine.counters import COUNTS, HISTOGRAMS, Histogram
from edgelm.engine.usage import Usage
from edgelm.jobs.answer import _ScriptMatcher as Script
from tests.engine.fake import Fault, SimpleDrafter
from tests.engine.test_engine import ENDLESS, emptied, events_of, greedy, running_engine


class Repeating(SimpleDrafter):
    """Drafts the same tokens always: most are refused."""

    def propose(self, seq: Sequence, marginal_cost: object, forced: object = ()) -> list[int]:
        return [1, 2]


async def test_tokens_and_times_are_counted() -> None:
    with running_engine() as (engine, _):
        prompts = ([1, 2, 3] * 20, [1, 2, 3] * 20, [4])
        stats = [(await events_of(engine.submit(prompt, greedy(9))))[-1].stats for prompt in prompts]
        copy = engine.counters.copy()
        counts, histograms = copy["counts"], copy["histograms"]
        assert counts["prompt_tokens_total"] == counts["prefix_cache_queries_total"] == 121
        assert counts["prefix_cache_hits_total"] == sum(one.cached_tokens for one in stats if one) >= 59
        assert counts["generation_tokens_total"] == 27
        assert copy["finished"] == {"length": 3}
        num_values = {name: sum(numbers[:-1]) for name, numbers in histograms.items()}
        assert num_values == dict.fromkeys(HISTOGRAMS, 3) | {"inter_token_latency_seconds": 24}
        waited_ms = sum(one.first_token_ms for one in stats if one)
        assert histograms["time_to_first_token_seconds"][-1] == pytest.approx(waited_ms / 1000)
        decode_ms = sum(one.decode_ms for one in stats if one)
        assert histograms["inter_token_latency_seconds"][-1] == pytest.approx(decode_ms / 1000)
        assert histograms["request_prompt_tokens"][-1] == 121
        assert set(counts) == set(COUNTS)


@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_sequences_that_made_way_are_counted(runs_ahead: bool) -> None:
    with running_engine(context=160, capacity=160, runs_ahead=runs_ahead) as (engine, _):
        alone = await events_of(engine.submit([1] * 60, greedy(60)))
        assert alone[-1].finish_reason == "length"
        assert engine.counters.copy()["counts"]["num_preemptions_total"] == 0
        streams = [engine.submit([number] * 60, greedy(60)) for number in range(2)]
        await asyncio.gather(*map(events_of, streams))
        assert engine.counters.copy()["counts"]["num_preemptions_total"] >= 1


async def test_drafts_are_counted_as_the_requests_have_them() -> None:
    with running_engine(drafter=Repeating()) as (engine, _):
        streams = [engine.submit([number] * 5, SamplingParams(max_tokens=30, seed=number)) for number in range(6)]
        answers = await asyncio.gather(*map(events_of, streams))
        stats = [events[-1].stats for events in answers]
        counts = engine.counters.copy()["counts"]
        drafted, accepted = (sum(getattr(one, name) for one in stats) for name in ("drafted", "accepted"))
        assert drafted > accepted
        assert counts["spec_decode_num_draft_tokens_total"] == drafted
        assert counts["spec_decode_num_accepted_tokens_total"] == accepted
        assert drafted / 2 <= counts["spec_decode_num_drafts_total"] <= drafted
        assert counts["generation_tokens_total"] == 180
        assert sum(engine.counters.copy()["histograms"]["time_to_first_token_seconds"][:-1]) == 6


async def test_a_complete_answer_is_no_abort() -> None:
    """The text decides that an answer is complete, as at a stop string, and ends its stream."""
    with running_engine() as (engine, _):
        complete, left = engine.submit([1, 2], ENDLESS), engine.submit([3, 4], ENDLESS)
        for stream in (complete, left):
            await anext(stream)
        await complete.stop()
        left.close()
        await emptied(engine)
        assert engine.counters.copy()["finished"] == {"stop": 1, "abort": 1}


async def test_a_request_that_never_ran_has_no_times() -> None:
    with running_engine(max_sequences=1) as (engine, _):
        running, waiting = engine.submit([1, 2], ENDLESS), engine.submit([3, 4], ENDLESS)
        await anext(running)
        assert (engine.num_requests, engine.num_running) == (2, 1)
        waiting.close()
        running.close()
        await emptied(engine)
        copy = engine.counters.copy()
        assert copy["finished"] == {"abort": 2}
        assert sum(copy["histograms"]["request_queue_time_seconds"][:-1]) == 1


@pytest.mark.parametrize("runs_ahead", [False, True])
async def test_the_used_share_of_the_cache_is_that_of_running_sequences(runs_ahead: bool) -> None:
    with running_engine(runs_ahead=runs_ahead, context=40_000, capacity=80_000) as (engine, _):
        assert engine.kv_usage == 0
        stream = engine.submit([1] * 20_000, ENDLESS)  # too long for the engine to fill the context meanwhile
        await anext(stream)
        assert 0.25 <= engine.kv_usage <= 0.6
        stream.close()
        await emptied(engine)
        assert engine.kv_usage == 0, "what is idle makes way"


@pytest.mark.parametrize("usage", [Usage("id"), None])
async def test_the_tokens_of_a_scored_prompt_are_no_answer(usage: Usage | None) -> None:
    """Without usage they do not count: an answer to the same prompt follows."""
    with running_engine() as (engine, _):
        ids = [1 + number % 7 for number in range(60)]
        params = SamplingParams(temperature=0, max_tokens=59, num_logprobs=1)
        events = await events_of(engine.submit(ids[:1], params, Script(ids[1:]), usage=usage, scoring=True))
        assert [sample.id for event in events for sample in event.sampled] == ids[1:]
        copy = engine.counters.copy()
        scored = 60 if usage else 0
        assert copy["counts"] == dict.fromkeys(COUNTS, 0) | {"prompt_tokens_total": scored}
        assert copy["finished"] == ({"length": 1} if usage else {})
        sums = {name: numbers[-1] for name, numbers in copy["histograms"].items() if numbers[-1]}
        assert sums == ({"request_prompt_tokens": 60} if usage else {})
        if usage:
            report = await usage.report()
            assert (report["prompt_tokens"], report["generated_tokens"], report["finish_reason"]) == (60, 0, "length")
            assert report["time_to_first_token_s"] is None


async def test_several_choices_cost_their_prompt_once() -> None:
    with running_engine() as (engine, _):
        usage = Usage("id")
        streams = [
            engine.submit([1] * 40, SamplingParams(max_tokens=6, choice=choice), usage=usage) for choice in range(3)
        ]
        for stream in streams:
            await events_of(stream)
        report = await usage.report()
        assert report["prompt_tokens"] == 40
        assert report["generated_tokens"] == 18
        assert report["finish_reason"] == "length"
        assert report["time_to_first_token_s"] > 0


async def test_the_usage_of_a_cancelled_request_is_known_when_it_has_ended() -> None:
    with running_engine() as (engine, _):
        usage = Usage("id")
        stream = engine.submit([1] * 7, ENDLESS, usage=usage)
        await anext(stream)
        stream.close()
        async with asyncio.timeout(30):
            report = await usage.report()
        assert (report["prompt_tokens"], report["finish_reason"]) == (7, "abort")
        assert report["generated_tokens"] >= 1


async def test_a_failed_step_names_its_requests_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with running_engine() as (engine, executor):
        executor.faults[0] = Fault("chunks")
        with pytest.raises(EngineError):
            await events_of(engine.submit([1, 2], greedy(5), usage=Usage("req_7")))
        assert "requests req_7 failed" in caplog.text


def test_a_histogram_counts_a_value_at_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (3.0, 1)):
        histogram.observe(value, times)
    assert histogram.copy() == [3, 1, 1, math.fsum((0.5, 2.0, 1.5, 3.0))]
