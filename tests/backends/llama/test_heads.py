"""Heads that predict several tokens, on real llama.cpp: they change no answer, and read the right hidden states."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from edgelm.backends.followed_heads import HEADS_WINDOW
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import NOT_A_TOKEN, Chunk, SamplingParams, Sequence, Step, Trim
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from tests.backends.llama.test_speculation import (
    answer,
    chi_square,
    critical,
    distribution_after,
    quantized,
    random_request,
)
from tests.counts import Count
from tests.odd_models import Odd

REQUESTS = Count(test=24, soak=400)
DRAWS = Count(test=3_000, soak=50_000)
OTHERS = 0.015  # weight of all tokens but the last: the head is right most of the time


class Files(NamedTuple):
    """A model, and the file of its heads; None: they are in the same file."""

    model: Path
    heads: Path | None = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(quantized(tmp_path_factory.mktemp("heads"), "qwen35", 5, heads=OTHERS))


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(quantized(tmp_path_factory.mktemp("heads"), "qwen35moe", 5, heads=OTHERS))


def apart(folder: Path, arch: Odd, heads: float) -> Files:
    return Files(*(quantized(folder, arch, 5, heads=heads, part=part) for part in ("model", "heads")))


@pytest.fixture(scope="module")
def in_two_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return apart(tmp_path_factory.mktemp("heads"), "qwen35", OTHERS)


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row more cost a hundredth of a step, however busy this machine is."""
    monkeypatch.setattr(StepClock, "observe", lambda *_: None)


class Counting(MtpDrafter):
    """Counts its tokens."""

    drafted = accepted = 0

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        super().observe(seq, drafted, accepted)
        self.drafted += drafted
        self.accepted += accepted


@contextmanager
def loaded(files: Files, *, heads: bool = True, repeatable_rows: int = 0) -> Iterator[LlamaExecutor]:
    model = LlamaModel(files.model, heads=heads and files.heads is None)
    beside = LlamaModel(files.heads, heads=True) if heads and files.heads else None
    options = LlamaOptions(context=1024, kv="int8", threads=1, rollback=3, heads=heads, repeatable_rows=repeatable_rows)
    executor = LlamaExecutor(model, options, heads=beside)
    try:
        yield executor
    finally:
        executor.close()


@contextmanager
def running(
    files: Files, *, heads: bool, repeatable_rows: int = 0
) -> Iterator[tuple[Engine, LlamaTokenizer, Counting | None, LlamaExecutor]]:
    """Run an engine that drafts by heads wherever it can."""
    with loaded(files, heads=heads, repeatable_rows=repeatable_rows) as executor:
        model = executor._model
        tokenizer = LlamaTokenizer.of_model(model.native, model)
        drafter = Counting(executor.heads, lambda: 1.0) if executor.heads else None
        clock = StepClock(StepCosts([Measured(1, 0, 0.010), Measured(64, 0, 0.0163)]))
        engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**26), clock, drafter), clock).start()
        try:
            yield engine, tokenizer, drafter, executor
        finally:
            engine.close()


@pytest.mark.parametrize("at_a_time", [1, 6])
@pytest.mark.parametrize("fixture", ["model", "with_experts", "in_two_files"])
def test_answers_are_the_same_with_heads_and_without(
    fixture: str, at_a_time: int, request: pytest.FixtureRequest
) -> None:
    """With six at a time, each has cells of its own: attention sums by cells, and those of others come between."""
    files = request.getfixturevalue(fixture)
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    print("seed", seed)
    requests = [random_request(rng, number) for number in range(REQUESTS)]
    rows = 64 if at_a_time > 1 else 0

    async def all_of_them(engine: Engine, tokenizer: LlamaTokenizer) -> list[Any]:
        free = asyncio.Semaphore(at_a_time)

        async def one(request: Any) -> Any:
            async with free:
                return await answer(engine, tokenizer, request)

        return await asyncio.gather(*map(one, requests))

    with running(files, heads=False, repeatable_rows=rows) as (engine, tokenizer, _, _):
        plain = asyncio.run(all_of_them(engine, tokenizer))
    with running(files, heads=True, repeatable_rows=rows) as (engine, tokenizer, drafter, _):
        drafted = asyncio.run(all_of_them(engine, tokenizer))
    assert drafted == plain  # texts, tokens, log-probabilities, reasons
    assert drafter
    assert drafter.accepted > 2 * REQUESTS
    assert drafter.accepted < drafter.drafted
    print(f"{drafter.accepted} of {drafter.drafted} accepted")


def test_sampled_tokens_have_the_model_s_own_distribution(model: Files) -> None:
    prompt = [7, 300, 41, 260]
    facts: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "max_tokens": 4}
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    with running(model, heads=True) as (engine, _, drafter, executor):

        async def draw_all() -> None:
            for seed in range(DRAWS):  # fixed seeds: the test passes always or never
                stream = engine.submit(prompt, SamplingParams(seed=seed, **facts))
                tokens = [sample.id async for event in stream for sample in event.sampled]
                for at in range(len(tokens)):
                    counts[tuple(tokens[:at])][tokens[at]] += 1

        asyncio.run(draw_all())
        assert drafter
        assert drafter.accepted > 0.2 * DRAWS
        assert drafter.drafted - drafter.accepted > 0.2 * DRAWS
        tested = [(before, counter) for before, counter in counts.items() if counter.total() >= 500]
        assert {len(before) for before, _ in tested} >= {0, 1, 2}
        for before, counter in tested:
            expected = distribution_after(executor, [*prompt, *before], SamplingParams(**facts))
            assert not set(counter) - set(expected), "a token was sampled that the distribution does not hold"
            statistic, freedom = chi_square(counter, expected)
            assert statistic < critical(freedom), f"after {before}: {counter} against {expected}"


class Fed:
    """One sequence that an executor computes chunk by chunk."""

    def __init__(self, executor: LlamaExecutor, number: int, slot: int) -> None:
        self.executor, self.slot = executor, slot
        self.seq = Sequence(number, [], 0, SamplingParams())
        self.heads.begin(number)

    @property
    def heads(self) -> Any:
        return self.executor.heads

    def compute(self, tokens: list[int], draft: list[int] | None = None) -> None:
        """Compute tokens behind those before, and perhaps a draft that is then cut off."""
        start = len(self.seq.tokens)
        self.seq.tokens += tokens
        rows = 1 if draft is None else len(tokens) + len(draft)
        self.executor.forward(Step((Chunk(self.seq, start, tokens + (draft or []), rows, self.slot),)))
        if draft:
            self.executor.forward(Step((), (Trim(self.slot, len(self.seq.tokens)),)))

    def draft(self, last: int, count: int = 3) -> list[tuple[int, float]]:
        results = [self.heads.first(self.seq.id, [*self.seq.tokens, last])]
        while len(results) < count:
            results.append(self.heads.next(self.seq.id, results[-1][0]))
        return results


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_a_draft_depends_on_the_tokens_alone(arch: Odd, tmp_path: Path) -> None:
    """Whatever was rejected, or drafted and dropped, or computed in other chunks: the hidden states are the same."""
    path = quantized(tmp_path, arch, 5, heads=1.0)
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    with loaded(Files(path)) as executor:
        for number in range(0, 12, 2):
            tokens = [rng.randrange(3, 500) for _ in range(rng.randint(18, HEADS_WINDOW - 4))]
            last = rng.randrange(3, 500)
            one, other = Fed(executor, number, 0), Fed(executor, number + 1, 1)
            one.compute(tokens)
            at = rng.randint(5, 15)
            other.compute(tokens[:at])
            while at < len(tokens):
                if rng.random() < 0.7:
                    other.draft(tokens[at])
                draft = [rng.randrange(3, 500) for _ in range(3)] if rng.random() < 0.5 else []
                count = 1 if draft else rng.randint(1, 4)
                other.compute(tokens[at : at + count], draft)
                at += count
            for (token, chance), (same, also) in zip(one.draft(last), other.draft(last), strict=True):
                assert (token, chance) == (same, pytest.approx(also, rel=0.02)), f"seed {seed}"
            for fed in (one, other):
                fed.heads.end(fed.seq.id)
                executor.forward(Step((), (Trim(fed.slot, 0),)))


def test_the_heads_see_the_last_positions_of_a_long_prompt_and_go_on_after_a_pause(model: Files) -> None:
    rng = random.Random(1)
    with loaded(model) as executor:
        fed = Fed(executor, 0, 0)
        fed.compute([rng.randrange(3, 500) for _ in range(400)])
        assert fed.draft(7)[0][0] != NOT_A_TOKEN
        for _ in range(HEADS_WINDOW + 20):
            fed.compute([rng.randrange(3, 500)], [])
        assert fed.draft(7)[0][0] != NOT_A_TOKEN


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe"])
def test_heads_in_a_file_of_their_own_draft_as_those_in_the_model_s(arch: Odd, tmp_path: Path) -> None:
    files = [Files(quantized(tmp_path, arch, 5, heads=1.0)), apart(tmp_path, arch, 1.0)]
    rng = random.Random(2)
    tokens = [rng.randrange(3, 500) for _ in range(30)]
    drafts = []
    for one in files:
        with loaded(one) as executor:
            fed = Fed(executor, 0, 0)
            fed.compute(tokens)
            drafts.append(fed.draft(9))
    assert drafts[0] == drafts[1]


def test_no_hidden_state_of_a_sequence_that_is_not_followed_is_copied(model: Files) -> None:
    with loaded(model) as executor:
        heads: Any = executor.heads
        heads.begin(0)
        kept = []
        with patch.object(heads, "keep", lambda chunk, hidden: kept.append((chunk.seq.id, len(hidden)))):
            seqs = [Sequence(number, [5] * 40, 40, SamplingParams()) for number in range(2)]
            executor.forward(Step(tuple(Chunk(seq, 0, seq.tokens, 1, seq.id) for seq in seqs)))
            assert kept == [(0, HEADS_WINDOW)]
            with patch.object(heads, "_states", lambda *_: pytest.fail("read for nobody")):
                executor.forward(Step((Chunk(seqs[1], 40, [5], 1, 1),)))


def test_nothing_is_drafted_without_hidden_states(model: Files) -> None:
    with loaded(model) as executor:
        fed = Fed(executor, 0, 0)
        assert executor.heads
        assert executor.heads.first(5, [1, 2]) == (NOT_A_TOKEN, 0.0), "a sequence that never began"
        fed.compute([9, 8, 7])
        assert fed.heads.first(0, [9, 8, 7, 6, 5]) == (NOT_A_TOKEN, 0.0), "a token that was not computed"
