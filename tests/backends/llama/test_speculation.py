"""Speculation changes no answer and no distribution: real llama.cpp, quantized weights, settings that are invariant."""

from __future__ import annotations

import asyncio
import ctypes
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgelm.backends.llama.binding import L
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Chunk, Drafter, Sampled, SamplingParams, Sequence, Step, Trim
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from tests.completion import complete
from tests.counts import Count
from tests.engine.fake import SimpleDrafter
from tests.engine.sampling.slow import exact
from tests.odd_models import Odd, Part, write_odd
from tests.tiny import write_tiny

DRAWS = Count(test=5_000, soak=50_000)
REQUESTS = Count(test=24, soak=400)
STEPS = Count(test=100, soak=3_000)


class Recorded(SimpleDrafter):
    """Proposes the recorded answer, with a mistake now and then."""

    def __init__(self, answers: dict[tuple[int, tuple[int, ...], int], list[int]], seed: int) -> None:
        self.answers = answers
        self.rng = random.Random(seed)
        self.drafted = self.accepted = 0

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        answer = self.answers[key_of(tuple(seq.tokens[: seq.prompt_len]), seq.params)]
        draft = answer[seq.completion_len :][: self.rng.randrange(0, 9)]
        return [(token + 1) % 500 if self.rng.random() < 0.15 else token for token in draft][: len(marginal_cost)]

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted


def key_of(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, tuple[int, ...], int]:
    return params.seed, prompt, params.choice


@contextmanager
def running(path: Path, drafter: Drafter | None) -> Iterator[tuple[Engine, LlamaTokenizer, LlamaExecutor]]:
    """Run an engine with flash attention and int8 KV, which is equal in every batch shape (design, section 6)."""
    model = LlamaModel(path)
    tokenizer = LlamaTokenizer.of_model(model.native, model)
    executor = LlamaExecutor(model, LlamaOptions(context=1024, kv="int8", threads=1, rollback=3))
    clock = StepClock()
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**26), clock, drafter), clock).start()
    try:
        yield engine, tokenizer, executor
    finally:
        engine.close()


def random_request(rng: random.Random, number: int) -> tuple[list[int], SamplingParams, list[str]]:
    prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 40))]
    params = SamplingParams(
        max_tokens=rng.randint(20, 60),
        temperature=rng.choice([0.0, 0.2, 0.8, 1.3]),
        top_k=rng.choice([0, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.1, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        presence_penalty=rng.choice([0.0, 0.4]),
        logit_bias=tuple((rng.randrange(500), rng.uniform(-5, 5)) for _ in range(rng.choice([0, 3]))),
        seed=rng.randrange(2**32),
        choice=number % 3,
        num_logprobs=rng.choice([None, 0, 5]),
        stop_ids=frozenset({2}),
    )
    return prompt, params, rng.choice([[], ["the"], ["zzz"]])


async def answer(engine: Engine, tokenizer: LlamaTokenizer, request: Any) -> tuple[str, list[Sampled], str | None]:
    prompt, params, stop = request
    text, sampled, reason = "", [], None
    async for delta in complete(engine, tokenizer, prompt, params, stop):
        text += delta.text
        sampled += delta.sampled
        reason = delta.finish_reason
    return text, sampled, reason


def quantized(
    folder: Path, arch: Odd, seed: int, *, heads: float | None = None, part: Part = "all", **more: Any
) -> Path:
    """Return a model with Q8_0 weights: those of F32 are equal in no setting."""
    source = write_odd(folder / f"{arch}-{part}.gguf", arch, seed, heads=heads, part=part, **more)
    path = folder / f"{'mtp-' * (part == 'heads')}{arch}-{part}-q8_0.gguf"
    params = L.llama_model_quantize_default_params()
    params.ftype, params.nthread = 7, 1
    assert L.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(params)) == 0
    return path


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "gemma3", "lfm2", "qwen35"])
def test_answers_are_the_same_with_drafts_and_without(tmp_path: Path, kind: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    if kind in ("gemma3", "lfm2", "qwen35"):  # a sliding window of 32 positions, and recurrent layers
        path = quantized(tmp_path, kind, seed % 1000)  # type: ignore[arg-type]
    else:
        path = write_tiny(tmp_path / "m.gguf", quant=kind, width=128, ffn=256, seed=seed % 1000)
    requests = [random_request(rng, number) for number in range(REQUESTS)]

    async def all_of_them(engine: Engine, tokenizer: LlamaTokenizer) -> list[tuple[str, list[Sampled], str | None]]:
        return [await answer(engine, tokenizer, request) for request in requests]

    with running(path, None) as (engine, tokenizer, _):
        plain = asyncio.run(all_of_them(engine, tokenizer))
    recorded = {
        key_of(tuple(prompt), params): [sample.id for sample in sampled]
        for (prompt, params, _), (_, sampled, _) in zip(requests, plain, strict=True)
    }
    drafter = Recorded(recorded, seed)
    with running(path, drafter) as (engine, tokenizer, _):
        drafted = asyncio.run(all_of_them(engine, tokenizer))
    assert drafted == plain  # texts, tokens, log-probabilities, reasons
    assert drafter.accepted > 10 * REQUESTS
    assert drafter.accepted < drafter.drafted


@pytest.mark.parametrize("arch", ["lfm2", "qwen35"])
def test_a_recurrent_state_goes_back_beside_a_sequence_that_does_not(tmp_path: Path, arch: Odd) -> None:
    """One step has a token of one sequence and a draft of another; llama.cpp splits it into several batches."""
    model = LlamaModel(quantized(tmp_path, arch, 1))
    executor = LlamaExecutor(model, LlamaOptions(context=256, kv="int8", threads=1, rollback=3, max_sequences=2))
    rng = random.Random()
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(2, 30))] for _ in range(2)]
    drafts = [[], [rng.randrange(3, 500) for _ in range(3)]]

    def run(*chunks: tuple[int, int, list[int]], cut: int | None = None) -> list[Any]:
        ops = () if cut is None else (Trim(1, cut),)
        step = Step(
            tuple(
                Chunk(Sequence(slot, [0], 1, SamplingParams()), start, tokens, 1, slot)
                for slot, start, tokens in chunks
            ),
            ops,
        )
        executor.forward(step)
        return [row.copy() for row in executor.logits(step)]

    try:
        assert executor.info.rollback_len == 3
        for kept in (1, 2, 3):
            ends = [len(prompt) for prompt in prompts]
            run(*((slot, 0, prompt) for slot, prompt in enumerate(prompts)))
            run((0, ends[0], [7]), (1, ends[1], [8, *drafts[1]]))
            after = run((0, ends[0] + 1, [9]), (1, ends[1] + kept, [10]), cut=ends[1] + kept)
            executor.forward(Step((), (Trim(0, 0), Trim(1, 0))))
            fresh = run((0, 0, [*prompts[0], 7, 9]), (1, 0, [*prompts[1], *[8, *drafts[1]][:kept], 10]))
            executor.forward(Step((), (Trim(0, 0), Trim(1, 0))))
            for one, other in zip(after, fresh, strict=True):
                assert np.abs(one - other).max() < 1e-3, f"{kept} kept: {prompts} {drafts}"
    finally:
        executor.close()


@pytest.mark.parametrize("arch", ["lfm2", "nemotron_h", "qwen35"])
def test_states_go_back_whatever_ran_in_the_same_step(tmp_path: Path, arch: Odd) -> None:
    """Prompts, drafts and plain tokens share a step, slots end and begin: each row is as if its sequence ran alone."""
    path = quantized(tmp_path, arch, 5)
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)

    def executor(max_sequences: int) -> LlamaExecutor:
        options = LlamaOptions(context=512, kv="int8", threads=1, rollback=3, max_sequences=max_sequences)
        return LlamaExecutor(LlamaModel(path), replace(options, repeatable_rows=64))

    many, alone = executor(6), executor(1)
    kept: dict[int, list[int]] = {}  # tokens, by slot
    for _ in range(STEPS):
        ops = [Trim(slot, 0) for slot in kept if rng.random() < 0.25 or len(kept[slot]) > 60]
        for op in ops:
            del kept[op.slot]
        count, chunks = rng.choice([1, 2, 3]), []
        for slot in rng.sample(range(6), 5):
            past = kept.get(slot, [])
            new = [rng.randrange(3, 500) for _ in range(rng.choice([1, 1 + count]) if past else rng.randint(2, 40))]
            rows = len(new) if past else 1
            chunks.append(Chunk(Sequence(slot, [0], 1, SamplingParams()), len(past), new, rows, slot))
        many.forward(Step(tuple(chunks), tuple(ops)))
        rows, cuts = many.logits(Step(tuple(chunks))).copy(), list[Trim]()
        for chunk in chunks:
            slot, past = chunk.seq.id, kept.get(chunk.seq.id, [])
            own = Step((Chunk(chunk.seq, 0, past + chunk.tokens, chunk.rows, 0),), (Trim(0, 0),))
            alone.forward(own)
            assert np.array_equal(rows[: chunk.rows], alone.logits(own)), f"{len(past)} + {chunk.tokens}"
            rows = rows[chunk.rows :]
            kept[slot] = past + chunk.tokens[: rng.randint(1, chunk.rows) if chunk.rows > 1 else None]
            if len(kept[slot]) < chunk.end:
                cuts.append(Trim(slot, len(kept[slot])))
        many.forward(Step((), tuple(cuts)))
    many.close()
    alone.close()


class Gambler(SimpleDrafter):
    """Proposes what followed the last two tokens in an earlier answer: right about as often as it is likely."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], int] = {}
        self.drafted = self.accepted = 0

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        draft: list[int] = []
        while len(draft) < len(marginal_cost):
            following = self.seen.get(tuple([*seq.tokens, *draft][-2:]))
            if following is None:
                break
            draft.append(following)
        return draft

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted

    def end(self, seq: Sequence) -> None:
        for at in range(seq.prompt_len, len(seq.tokens)):
            self.seen[tuple(seq.tokens[at - 2 : at])] = seq.tokens[at]


def test_sampled_tokens_have_the_model_s_own_distribution(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="q8_0", width=128, ffn=256)
    prompt = [7, 300, 41, 260]
    facts: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "max_tokens": 4}
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    drafter = Gambler()
    with running(path, drafter) as (engine, _, executor):

        async def draw(seed: int) -> list[int]:
            stream = engine.submit(prompt, SamplingParams(seed=seed, **facts))
            return [sample.id async for event in stream for sample in event.sampled]

        async def draw_all() -> None:
            for seed in range(DRAWS):  # fixed seeds: the test passes always or never
                tokens = await draw(seed)
                for at in range(len(tokens)):
                    counts[tuple(tokens[:at])][tokens[at]] += 1

        asyncio.run(draw_all())
        assert drafter.accepted > 0.2 * DRAWS
        assert drafter.drafted - drafter.accepted > 0.2 * DRAWS
        tested = [(before, counter) for before, counter in counts.items() if counter.total() >= 500]
        assert {len(before) for before, _ in tested} >= {0, 1, 2}
        for before, counter in tested:
            expected = distribution_after(executor, [*prompt, *before], SamplingParams(**facts))
            assert not set(counter) - set(expected), "a token was sampled that the distribution does not hold"
            statistic, freedom = chi_square(counter, expected)
            assert statistic < critical(freedom), f"after {before}: {counter} against {expected}"


def distribution_after(executor: LlamaExecutor, tokens: list[int], params: SamplingParams) -> dict[int, float]:
    """Return the probabilities of the next token, from a plain step and the slow sampler's definition."""
    seq = Sequence(0, tokens, len(tokens), params)
    step = Step((Chunk(seq, 0, tokens, 1, 7),), (Trim(7, 0),))
    executor.forward(step)
    distribution = exact(np.array(executor.logits(step)[0]), params, tokens, [], None)
    return dict(zip(distribution.ids, np.diff(distribution.ends, prepend=0.0).tolist(), strict=True))


def chi_square(counter: Counter[int], expected: dict[int, float]) -> tuple[float, int]:
    """Return Pearson's statistic and its degrees of freedom; rare tokens are taken together."""
    total = counter.total()
    common = {token: share for token, share in expected.items() if share * total >= 5}
    cells = [(counter[token], share * total) for token, share in common.items()]
    rest = total - sum(seen for seen, _ in cells), total - sum(due for _, due in cells)
    if rest[1] >= 5:
        cells.append(rest)
    return sum((seen - due) ** 2 / due for seen, due in cells), len(cells) - 1


def critical(freedom: int, z: float = 4.0) -> float:
    """Return the chi-square value exceeded as rarely as `z` by a normal variable (Wilson and Hilferty, 1931)."""
    if freedom == 0:
        return 1e-6
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
