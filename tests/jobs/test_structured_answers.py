"""Answers of tiny random models under grammars: every finished one obeys its schemas, in every format of calls."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.model import LoadedModel
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Drafter, Sequence
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.sampling.grammar import GrammarCompiler
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from edgelm.text.prompt_token_cache import PromptTokenCache
from tests.backends.torch import torch_engine
from tests.counts import Count
from tests.jobs.structured import (
    FORMS,
    Answerers,
    Case,
    Report,
    Result,
    ask,
    judged,
    random_case,
    random_schema,
    shared_schemas,
    write_model,
)

SCHEMAS = Count(test=len(FORMS), soak=1000)  # for each backend
EQUAL = Count(test=20, soak=200)
CONTEXT = 4096
AT_ONCE = 6


class Drafts(NgramDrafter):
    """Drafts as if rows cost next to nothing; without a guess, tokens of the text at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        draft = super().propose(seq, [0.001] * len(marginal_cost), forced)
        return draft or self._rng.choices(seq.tokens, k=self._rng.randrange(4))[: len(marginal_cost)]


@contextmanager
def llama(path: Path, drafter: Drafter | None) -> Iterator[LoadedModel]:
    """Run an engine whose arithmetic is equal with drafts and without: flash attention and int8 KV."""
    model = LlamaModel(path)
    tokenizer = LlamaTokenizer.of_model(model.native, model)
    executor = LlamaExecutor(model, LlamaOptions(context=CONTEXT, kv="int8", threads=1))
    clock = StepClock()
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**26), clock, drafter), clock).start()
    try:
        yield LoadedModel("tiny", engine, tokenizer, PromptTokenCache())
    finally:
        engine.close()


@contextmanager
def torch(path: Path, drafter: Drafter | None) -> Iterator[LoadedModel]:
    decoder = torch_engine.load_gguf(path)
    with torch_engine.running(decoder, drafter=drafter, context=CONTEXT) as engine:
        yield LoadedModel("tiny", engine, LlamaTokenizer.from_file(path), PromptTokenCache())


Backend = Callable[[Path, Drafter | None], AbstractContextManager[LoadedModel]]


async def answers(
    backend: Backend, path: Path, drafter: Drafter | None, seed: int, count: int, at_once: int, report: Report
) -> list[tuple[Case, Result | Exception]]:
    """Return the answers to random requests; the same seed makes the same requests."""
    rng = random.Random(seed)
    pool = shared_schemas()
    rng.shuffle(pool)
    schemas = itertools.chain(pool[: count // 2], iter(lambda: random_schema(rng), None))
    with backend(path, drafter) as loaded:
        compiler = GrammarCompiler(loaded.tokenizer, loaded.engine.info.num_vocab)
        answerers = Answerers(loaded, compiler)
        numbers = (number % len(FORMS) for number in range(count))
        cases = [random_case(rng, number, schema, answerers) for number, schema in zip(numbers, schemas, strict=False)]
        gate = asyncio.Semaphore(at_once)

        async def one(case: Case) -> Result | Exception:
            async with gate:
                return await ask(answerers, case, report)

        try:
            return list(zip(cases, await asyncio.gather(*map(one, cases)), strict=True))
        finally:
            await compiler.close()


@pytest.fixture(scope="module")
def seed() -> int:
    return secrets.randbits(32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", seed)


@pytest.mark.timeout(Count(test=120, soak=1200))
@pytest.mark.parametrize("backend", [llama, torch])
async def test_every_finished_answer_obeys_its_schemas(backend: Backend, model: Path, seed: int) -> None:
    report = Report()
    for case, result in await answers(backend, model, Drafts(seed), seed, SCHEMAS, AT_ONCE, report):
        try:
            judged(case, result, report)
        except AssertionError as error:
            form = FORMS[case.number][1].name
            raise AssertionError(f"seed {seed}, {form}, thinks {case.thinks}, {case.kind}: {error}") from error
    print(f"\n{backend.__name__}, seed {seed}", *report.lines(), sep="\n")
    finished = report.count("valid") + report.count("relaxed")
    assert finished + report.count("cut") + report.count("refused") == SCHEMAS
    assert finished >= 0.7 * SCHEMAS, f"seed {seed}: {report}"
    assert report.calls > SCHEMAS // 4, f"seed {seed}: {report}"
    assert report.forced > report.tokens // 8, f"seed {seed}: {report}"
    assert report.accepted, f"seed {seed}: {report}"


@pytest.mark.timeout(Count(test=120, soak=600))
async def test_an_answer_is_the_same_with_drafts_and_without(model: Path, seed: int) -> None:
    plain, report = Report(), Report()
    expected = await answers(llama, model, None, seed, EQUAL, 1, plain)
    assert plain.forced == plain.drafted == 0, "without speculation nothing is drafted"
    drafted = await answers(llama, model, Drafts(seed), seed, EQUAL, 1, report)
    assert report.forced, f"seed {seed}"
    assert report.drafted, f"seed {seed}"
    for (case, one), (_, other) in zip(expected, drafted, strict=True):
        note = f"seed {seed}, {FORMS[case.number][1].name}, {case.kind}"
        if isinstance(one, Exception) or isinstance(other, Exception):
            assert str(one) == str(other), note
            continue
        assert (one.reason, one.answer.reasoning, one.answer.content, one.answer.calls) == (
            other.reason, other.answer.reasoning, other.answer.content, other.answer.calls
        ), note  # fmt: skip
