"""The rule of `--repeatable`: the logits of a sequence, to the bit, whatever runs, ends and is rejected beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgelm.backends.drafting import measured_clock
from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.memory import REPEATABLE_KV
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.repeatable import MOST_ROWS, equal_rows, rule_for
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.places import Places
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step, Trim
from edgelm.engine.step_times import DEPTH
from tests.tiny import write_tiny

SEQUENCES = 6
PROMPT_LEN = 150
ANSWER_LEN = 12
MOST_TOKENS = 400  # of a step
OPTIONS = LlamaOptions(context=256, kv="int8")
SHAPE = {"width": 256, "ffn": 256, "heads": 4, "head_dim": 64}


@contextmanager
def running(path: Path, options: LlamaOptions, *, repack: bool = True) -> Iterator[LlamaExecutor]:
    executor = LlamaExecutor(LlamaModel(path, repack=repack), options)
    try:
        yield executor
    finally:
        executor.close()


def forward(executor: LlamaExecutor, *chunks: Chunk) -> NDArray[np.float32]:
    step = Step(chunks)
    executor.forward(step)
    return executor.logits(step).copy()


def alone(executor: LlamaExecutor, seq: Sequence) -> NDArray[np.float32]:
    """Return the logits of the answer's rows, computed one at a time behind a prompt in one step."""
    forward(executor, Chunk(seq, 0, seq.tokens[:PROMPT_LEN], 0, 0))
    rows = [forward(executor, Chunk(seq, at, [seq.tokens[at]], 1, 0)) for at in range(PROMPT_LEN, len(seq.tokens))]
    executor.forward(Step((), (Trim(0, 0),)))
    return np.concatenate(rows)


def together(executor: LlamaExecutor, seqs: list[Sequence], rng: random.Random) -> dict[int, NDArray[np.float32]]:
    """Return the same rows: prompts in pieces, several rows verified, drafts rejected, and slots freed meanwhile."""
    slots = rng.sample(range(SEQUENCES), SEQUENCES)
    computed = dict.fromkeys(range(SEQUENCES), 0)
    found: dict[int, list[NDArray[np.float32]]] = {number: [] for number in computed}
    while computed:
        chunks, kept, trims, room = [], [], [], MOST_TOKENS
        for number in rng.sample(list(computed), rng.randint(1, len(computed))):
            seq, start, rejected = seqs[number], computed[number], 0
            if start < PROMPT_LEN:
                end, rows = min(start + rng.randint(1, 90), PROMPT_LEN), 0
            else:
                end, rejected = min(start + rng.randint(1, 5), len(seq.tokens)), rng.randint(0, 3)
                rows = end - start + rejected
            if end - start + rejected > room:
                continue
            room -= end - start + rejected
            chunks.append(Chunk(seq, start, seq.tokens[start:end] + [5] * rejected, rows, slots[number]))
            kept.append((number, rows - rejected, rejected))
            is_over = end == len(seq.tokens)
            trims += [Trim(slots[number], 0 if is_over else end)] if rejected or is_over else []
            computed[number] = end
        logits, first = forward(executor, *chunks), 0
        for number, rows, rejected in kept:
            found[number].append(logits[first : first + rows])
            first += rows + rejected
        if trims:
            executor.forward(Step((), tuple(trims)))
        computed = {number: at for number, at in computed.items() if at < len(seqs[number].tokens)}
    return {number: np.concatenate(rows) for number, rows in found.items()}


def different_rows(executor: LlamaExecutor, seed: int) -> int:
    """Return how many rows of random sequences have other bits together than alone."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3, 500) for _ in range(PROMPT_LEN + ANSWER_LEN)] for _ in range(SEQUENCES)]
    seqs = [Sequence(number, text, 1, SamplingParams(temperature=0)) for number, text in enumerate(texts)]
    expected = [alone(executor, seq) for seq in seqs]
    found = together(executor, seqs, rng)
    return sum(int((found[number] != rows).any(1).sum()) for number, rows in enumerate(expected))


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q4_k"])
def test_a_sequence_has_equal_bits_beside_others(quant: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant=quant, **SHAPE)
    seed = random.randrange(2**32)
    for kv in REPEATABLE_KV:
        options = LlamaOptions(context=256, kv=kv, max_sequences=SEQUENCES)
        rule = rule_for(lambda repack: LlamaModel(path, repack=repack), options, [path], (), tmp_path, repack=True)
        with running(path, replace(options, repeatable_rows=rule.rows), repack=rule.repack) as executor:
            assert different_rows(executor, seed) == 0, (kv, rule, seed)


@pytest.mark.parametrize("quant", ["q8_0", "q4_k"])
def test_more_sequences_than_equal_rows_have_equal_bits(quant: str, tmp_path: Path) -> None:
    """llama.cpp itself takes a row of each of n + 1 sequences into a micro-batch of n."""
    path = write_tiny(tmp_path / "m.gguf", quant=quant, **SHAPE)
    rng = random.Random(random.randrange(2**32))
    options = LlamaOptions(context=256, kv="int8", max_sequences=9)
    rule = rule_for(lambda repack: LlamaModel(path, repack=repack), options, [path], (), tmp_path, repack=True)
    for most in sorted({min(rule.rows, 8), 2}):
        with running(path, replace(options, repeatable_rows=most), repack=rule.repack) as executor:
            texts = [[rng.randrange(3, 500) for _ in range(PROMPT_LEN + 2)] for _ in range(most + 1)]
            seqs = [Sequence(at, text, 1, SamplingParams(temperature=0)) for at, text in enumerate(texts)]
            expected = [alone(executor, seq) for seq in seqs]
            for at, seq in enumerate(seqs):
                forward(executor, Chunk(seq, 0, seq.tokens[:PROMPT_LEN], 0, at))
            for row in range(2):
                at = PROMPT_LEN + row
                rows = forward(executor, *(Chunk(seq, at, [seq.tokens[at]], 1, slot) for slot, seq in enumerate(seqs)))
                assert np.array_equal(rows, [one[row] for one in expected]), (most, rule)


@pytest.mark.parametrize("repeatable_rows", [MOST_ROWS, 0])
def test_cells_that_others_leave_do_not_count(repeatable_rows: int, tmp_path: Path) -> None:
    """In a cache for all sequences, an answer goes on in the cells before its prompt, and sums have another order."""
    path = write_tiny(tmp_path / "m.gguf", quant="q8_0", **SHAPE)
    rng = random.Random(1)
    texts = [[rng.randrange(3, 500) for _ in range(PROMPT_LEN + ANSWER_LEN)] for _ in range(2)]
    seq, other = (Sequence(number, text, 1, SamplingParams(temperature=0)) for number, text in enumerate(texts))
    options = replace(OPTIONS, kv="k8v16", flash=True, max_sequences=2, repeatable_rows=repeatable_rows)
    with running(path, options) as executor:
        expected = alone(executor, seq)
        forward(executor, Chunk(other, 0, other.tokens[:60], 0, 1))
        forward(executor, Chunk(seq, 0, seq.tokens[:PROMPT_LEN], 0, 0))
        executor.forward(Step((), (Trim(1, 0),)))
        rows = [forward(executor, Chunk(seq, at, [seq.tokens[at]], 1, 0)) for at in range(PROMPT_LEN, len(seq.tokens))]
        assert np.array_equal(np.concatenate(rows), expected) == (repeatable_rows > 0)


def test_16_bits_have_other_bits_beside_others(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="q8_0", **SHAPE)
    with running(path, LlamaOptions(context=1024, max_sequences=SEQUENCES, threads=1)) as executor:
        assert different_rows(executor, 1) > 0
        assert not executor.info.repeatable


def test_rows_are_equal_as_far_as_the_weights_allow(tmp_path: Path) -> None:
    options = LlamaOptions(context=512, kv="int8", max_sequences=2, threads=1, repeatable_rows=MOST_ROWS)
    for quant, expected in (("q8_0", {MOST_ROWS}), ("f32", {1}), ("f16", {1})):
        with running(write_tiny(tmp_path / f"{quant}.gguf", quant=quant, **SHAPE), options) as executor:
            assert equal_rows(executor) in expected, quant


def test_weights_of_floats_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="f16", **SHAPE)
    for _ in range(2):  # measured, and kept
        with pytest.raises(ModelError, match="--repeatable is not for this model"):
            rule_for(
                lambda repack: LlamaModel(path, repack=repack), OPTIONS, [path], (), tmp_path / "kept", repack=True
            )


def test_the_rule_is_measured_once(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", quant="q8_0")
    loads = []

    def load(repack: bool) -> LlamaModel:
        loads.append(repack)
        return LlamaModel(path, repack=repack)

    first = rule_for(load, OPTIONS, [path], (), tmp_path / "kept", repack=True)
    assert loads
    loads.clear()
    assert rule_for(load, OPTIONS, [path], (), tmp_path / "kept", repack=True) == first
    assert not loads
    path.write_bytes(write_tiny(tmp_path / "n.gguf", quant="q8_0", seed=1).read_bytes())
    rule_for(load, OPTIONS, [path], (), tmp_path / "kept", repack=True)
    assert loads


def test_drafts_deep_in_a_context_are_priced_although_nothing_measures_there(tmp_path: Path) -> None:
    """The benchmark fills a cache by copies, which such a cache has none of; attention makes rows dear there."""
    places = Places({"EDGELM_CACHE_DIR": str(tmp_path)})
    options = replace(OPTIONS, context=4096, max_sequences=2, repeatable_rows=MOST_ROWS)
    with running(write_tiny(tmp_path / "m.gguf", quant="q8_0", context=4096), options) as executor:
        clock = measured_clock(executor, Settings(), places, b"identity", deep_row_s=60.0)
    assert clock.marginal_cost(1, DEPTH, 1, 4) == pytest.approx([1.0] * 4, rel=0.1), "a row costs as much as a step"
