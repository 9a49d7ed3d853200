"""Random work on models with recurrent layers, with drafts of every kind: each answer is the one without drafts.

In the setting of `--repeatable`, in which an answer has equal bits whatever runs beside it; the product refuses it for
such models, because their prompts are not measured. Sequences begin and end at any time, share prefixes and snapshots,
are abandoned, and draft by heads, from texts, by both, or not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Drafter, SamplingParams, Sequence
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation import throttle
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from edgelm.engine.speculation.throttle import ChainDrafter, ThrottledDrafter
from tests.backends.llama.test_speculation import key_of, quantized, random_request
from tests.counts import Count
from tests.engine.fake import SimpleDrafter
from tests.odd_models import Odd

WORKLOADS = Count(test=24, soak=10_000)  # of all architectures
OF_A_MODEL = 50  # the next workloads have another one, of other random weights
ARCHS: tuple[Odd, ...] = ("qwen35", "lfm2", "nemotron_h", "qwen35moe")
OTHERS = 0.015  # weight of all tokens but the last: heads and texts are right most of the time


@dataclass(frozen=True)
class Request:
    tokens: list[int]
    params: SamplingParams
    delay: int  # rounds of the event loop before it is sent
    abandoned: int | None  # after so many events


class Knowing(SimpleDrafter):
    """Stands for drafts from texts: proposes what was answered without drafts, with a mistake now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.answers: dict[Any, list[int]] = {}
        self._rng = rng

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        answer = self.answers.get(key_of(tuple(seq.tokens[: seq.prompt_len]), seq.params), [])
        draft = answer[seq.completion_len :][: self._rng.randrange(0, 5)]
        return [(token + 1) % 500 if self._rng.random() < 0.2 else token for token in draft][: len(marginal_cost)]


@contextmanager
def running(path: Path, knowing: Knowing | None = None) -> Iterator[Engine]:
    """Run an engine, which drafts if there is a drafter that knows the answers."""
    heads = knowing is not None and "qwen35" in path.name
    options = LlamaOptions(context=512, kv="int8", threads=1, rollback=3, max_sequences=6, heads=heads)
    executor = LlamaExecutor(LlamaModel(path, heads=heads), replace(options, repeatable_rows=64))
    clock = StepClock(StepCosts([Measured(1, 0, 0.010), Measured(64, 0, 0.0163)]))
    drafter = _drafter(executor, clock, knowing) if knowing else None
    kv = SlotKV(executor.info, 2**22)
    engine = Engine(executor, Scheduler(executor.info, kv, clock, drafter), clock).start()
    try:
        yield engine
    finally:
        engine.close()


def _drafter(executor: LlamaExecutor, clock: StepClock, knowing: Knowing) -> Drafter:
    drafters: dict[str, Drafter] = {"ngram": knowing}
    if executor.heads:
        drafters["mtp"] = MtpDrafter(executor.heads, lambda: 1.0)
    return ChainDrafter([ThrottledDrafter(drafter, clock, name=name) for name, drafter in drafters.items()])


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row more cost a hundredth of a step, however busy this machine is."""
    monkeypatch.setattr(StepClock, "observe", lambda *_: None)
    monkeypatch.setattr(throttle, "time", SimpleNamespace(perf_counter=lambda: 0.0))


def random_workload(rng: random.Random, past: list[list[int]]) -> list[Request]:
    """Return requests, of which some go on with what was asked and answered before."""
    requests = []
    for number in range(rng.randint(1, 8)):
        prompt, params, _ = random_request(rng, number)
        if past and rng.random() < 0.5:
            prompt = rng.choice(past)[-300:] + prompt[: rng.randint(1, 8)]
        draft = rng.choice(["auto", "auto", "ngram", "mtp", "off"])
        params = replace(params, max_tokens=rng.randint(1, 24), draft=draft)
        abandoned = rng.randint(1, 6) if rng.random() < 0.15 else None
        requests.append(Request(prompt, params, rng.choice([0, 0, 5, 40]), abandoned))
    return requests


async def answers(engine: Engine, requests: list[Request]) -> tuple[list[Any], int]:
    """Return the samples of each request, None for one that was abandoned; and how many drafted ones were accepted."""
    accepted = 0

    async def one(request: Request) -> Any:
        nonlocal accepted
        for _ in range(request.delay):
            await asyncio.sleep(0)
        sampled, count = [], 0
        async with aclosing(engine.submit(request.tokens, request.params)) as events:
            async for event in events:
                sampled += event.sampled
                accepted += event.accepted
                count += 1
                if count == request.abandoned:
                    return None
        return sampled

    return await asyncio.gather(*map(one, requests)), accepted


@pytest.mark.parametrize("arch", ARCHS)
def test_random_work_is_answered_as_without_drafts(arch: Odd, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    left, accepted, num_requests = WORKLOADS // len(ARCHS), 0, 0
    while left > 0:
        number, past = min(left, OF_A_MODEL), list[list[int]]()
        path = quantized(tmp_path, arch, rng.randrange(1000), heads=OTHERS if "qwen35" in arch else None)
        knowing = Knowing(rng)
        with running(path) as plain, running(path, knowing) as drafting:
            for _ in range(number):
                requests = random_workload(rng, past)
                expected, _ = asyncio.run(answers(plain, requests))
                for request, one in zip(requests, expected, strict=True):
                    known = [sample.id for sample in one or ()]
                    knowing.answers[key_of(tuple(request.tokens), request.params)] = known
                drafted, count = asyncio.run(answers(drafting, requests))
                accepted += count
                num_requests += len(requests)
                for request, one, other in zip(requests, expected, drafted, strict=True):
                    if request.abandoned is None:
                        assert other == one, request
                        past.append(request.tokens + [sample.id for sample in one])
                del past[:-20]
        left -= number
    print(f"{WORKLOADS // len(ARCHS)} workloads of {arch}: {num_requests} requests, {accepted} drafted tokens accepted")
    assert accepted > num_requests // 2
