"""Grammars on real llama.cpp: every finished answer is valid, and drafts and forced tokens change no answer."""

from __future__ import annotations

import asyncio
import json
import math
import random
import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import EdgeLMError, RequestError
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Drafter, SamplingParams, Sequence, Stats
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.sampling.grammar import Grammar, GrammarCompiler
from edgelm.engine.scheduler import Scheduler
from tests.completion import complete
from tests.counts import Count
from tests.engine.fake import SimpleDrafter
from tests.tiny import EOS, write_tiny

REQUESTS = Count(test=24, soak=400)

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"happy": {"type": "boolean"}, "cat": {"enum": ["dog", "tree house"]}, "n": {"type": "integer"}},
        "required": ["happy", "cat", "n"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-f]{2,6}$"},
            "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        },
        "required": ["name", "where"],
        "additionalProperties": False,
    },
]


class NoDrafts(SimpleDrafter):
    """Speculation is on, and this drafter has nothing: only forced tokens are drafted."""

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        return []


class Nonsense(SimpleDrafter):
    """Drafts what comes to mind: letters, quotes, ends, the past."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        rng = self.rng
        choices = [*range(2, 500), *[3 + byte for byte in b'",: 0123456789abcdef}]'] * 20, *seq.tokens]
        return [rng.choice(choices) for _ in range(rng.randrange(4))][: len(marginal_cost)]


@contextmanager
def running(path: Path, drafter: Drafter | None) -> Iterator[tuple[Engine, LlamaTokenizer]]:
    """Run an engine whose arithmetic is equal with drafts and without: flash attention and int8 KV."""
    model = LlamaModel(path)
    tokenizer = LlamaTokenizer.of_model(model.native, model)
    executor = LlamaExecutor(model, LlamaOptions(context=1024, kv="int8", threads=1))
    clock = StepClock()
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**26), clock, drafter), clock).start()
    try:
        yield engine, tokenizer
    finally:
        engine.close()


@dataclass(frozen=True)
class Result:
    text: str
    reason: str  # of its end, or an error's line
    stats: Stats | None = field(default=None, compare=False)


async def answer(
    engine: Engine, tokenizer: LlamaTokenizer, grammar: Grammar, prompt: list[int], params: SamplingParams
) -> Result:
    text, reason, stats = "", "", None
    try:
        async for delta in complete(engine, tokenizer, prompt, params, matcher=grammar.matcher()):
            text += delta.text
            reason, stats = delta.finish_reason or reason, delta.stats or stats
    except EdgeLMError as error:
        reason = str(error)
    return Result(text, reason, stats)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", context=1024, quant="q8_0", width=128, ffn=256)


async def run_all(
    path: Path, drafter: Drafter | None, requests: list[Any], at_once: int
) -> tuple[list[Result], int, int]:
    """Return the answers, the forced tokens and the tokens."""
    with running(path, drafter) as (engine, tokenizer):
        compiler = GrammarCompiler(tokenizer, engine.info.num_vocab)
        grammars = [await compiler.compile(GrammarSpec("json_schema", json.dumps(schema))) for schema in SCHEMAS]
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: list[int], params: SamplingParams, which: int) -> Result:
            async with gate:
                return await answer(engine, tokenizer, grammars[which], prompt, params)

        results = await asyncio.gather(*(one(*request) for request in requests))
        await compiler.close()
    all_stats = [result.stats for result in results if result.stats]
    return results, sum(stats.forced for stats in all_stats), sum(stats.completion_tokens for stats in all_stats)


async def test_answers_are_valid_and_equal_with_drafts_and_forced_tokens(tiny: Path) -> None:
    rng = random.Random(seed := secrets.randbits(32))
    requests = [
        (
            [rng.randrange(3, 500) for _ in range(rng.randint(1, 30))],
            SamplingParams(
                max_tokens=rng.choice([12, 90, 90]),
                temperature=rng.choice([0.0, 0.8, 1.5]),
                top_k=rng.choice([0, 40]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                seed=rng.randrange(2**32),
                stop_ids=frozenset({EOS}),
            ),
            rng.randrange(len(SCHEMAS)),
        )
        for _ in range(REQUESTS)
    ]
    plain, forced, _ = await run_all(tiny, None, requests, at_once=1)
    assert forced == 0, "without speculation nothing is drafted"
    check_valid(requests, plain, f"seed {seed}")
    for drafter in (NoDrafts(), Nonsense(seed)):
        other, forced, tokens = await run_all(tiny, drafter, requests, at_once=1)
        assert other == plain, f"seed {seed}, {drafter}"
        assert forced > tokens // 8, "forced tokens are drafted, whatever a drafter says"
    together, _, _ = await run_all(tiny, Nonsense(seed), requests, at_once=6)  # batches may round otherwise
    check_valid(requests, together, f"seed {seed}")


def check_valid(requests: list[Any], results: list[Result], note: str) -> None:
    finished = 0
    for (_, _, which), result in zip(requests, results, strict=True):
        assert result.reason in ("stop", "length"), note
        if result.reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(result.text), SCHEMAS[which])
    assert finished >= REQUESTS // 4, note


async def test_what_ends_a_constrained_answer_is_told_apart(tiny: Path) -> None:
    params = SamplingParams(max_tokens=100, temperature=0, stop_ids=frozenset({EOS}))
    with running(tiny, NoDrafts()) as (engine, tokenizer):
        compiler = GrammarCompiler(tokenizer, engine.info.num_vocab)
        yes = await compiler.compile(GrammarSpec("choice", '["yes"]'))
        result = await answer(engine, tokenizer, yes, [5, 6], params)
        assert result == Result("yes", "stop")
        assert result.stats
        assert result.stats.completion_tokens == result.stats.forced + 1, "the first with the prompt, none for EOS"
        biased = replace(params, logit_bias=tuple((token, -math.inf) for token in yes.matcher().forced(1)))
        assert "logit_bias forbids" in (await answer(engine, tokenizer, yes, [5, 6], biased)).reason
        hard = await compiler.compile(GrammarSpec("regex", "((a{1,100}){1,100}){1,100}"))
        result = await answer(engine, tokenizer, hard, [5, 6], replace(params, logit_bias=((EOS, -math.inf),)))
        assert "cannot follow the grammar" in result.reason
        assert set(result.text) == {"a"}
        assert await answer(engine, tokenizer, yes, [5, 6], params) == Result("yes", "stop"), "others go on"
        with pytest.raises(RequestError):
            await compiler.compile(GrammarSpec("lark", "start: <[99999]>"))
        await compiler.close()
