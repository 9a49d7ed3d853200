"""Cases of the ops that work on rows of numbers: norms of Llama-8B's width, samples of its vocabulary, the probe."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from edgelm.kernels.bandwidth import BLOCK_LEN, read
from edgelm.kernels.benchmark import BenchCase, Work, nbytes_of
from edgelm.kernels.norm import add_rms_norm
from edgelm.kernels.sampling import Answer, Batch, Flag, Word, sample

ROWS = (1, 8, 16)
TOLERANCE = 2 * 2.0**-11  # float16 results: half a unit in the last place, on either side


class Sum(NamedTuple):
    """Inputs of `add_rms_norm`."""

    x: Tensor
    residual: Tensor
    weight: Tensor


class Draw(NamedTuple):
    """Inputs of `sample`."""

    logits: Tensor  # float32 [rows, vocab]
    batch: Batch


class Recipe(NamedTuple):
    """Parameters of a sample."""

    name: str
    flags: int = Flag.ACTIVE
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    penalties: bool = False
    num_top: int = -1


RECIPES = (
    Recipe("greedy", Flag.ACTIVE | Flag.GREEDY),
    Recipe("temperature"),
    Recipe("top-k 40, top-p 0.95", top_k=40, top_p=0.95),
    Recipe("top-p 0.95", top_p=0.95),
    Recipe("penalties, top-p 0.95", top_p=0.95, penalties=True),
    Recipe("greedy, 5 log-probabilities", Flag.ACTIVE | Flag.GREEDY, num_top=5),
)


def bench_cases(tiny: bool) -> list[BenchCase]:
    """Return the cases of norm, sampling and bandwidth."""
    rows = (1, 3) if tiny else ROWS
    cases = [_norm(192 if tiny else 4096, n) for n in rows]
    cases += [_sampling(recipe, 1000 if tiny else 128256, n) for recipe in RECIPES for n in rows]
    return [*cases, _bandwidth(3 * BLOCK_LEN if tiny else 1 << 28)]


def _norm(width: int, rows: int) -> BenchCase:
    return BenchCase(
        op="norm",
        shape=f"add_rms_norm {width}",
        rows=rows,
        format="float16",
        work=Work(
            partial(_sum, width, rows),
            lambda given, how: add_rms_norm(given.x, given.residual, given.weight, 1e-5, implementation=how),
        ),
        moved_bytes=lambda given: nbytes_of(given) + nbytes_of((given.x, given.residual)),
        tolerance=TOLERANCE,
    )


def _sum(width: int, rows: int, generator: Generator) -> Sum:
    x, residual = torch.randn(2, rows, width, generator=generator)
    return Sum(x.half(), residual.clone(), 1 + torch.randn(width, generator=generator) / 4)


def _sampling(recipe: Recipe, vocab: int, rows: int) -> BenchCase:
    return BenchCase(
        op="sampling",
        shape=f"{vocab} {recipe.name}",
        rows=rows,
        format="float32",
        work=Work(
            partial(_draw, recipe, vocab, rows),
            lambda given, how: sample(given.logits, given.batch, implementation=how),
        ),
        moved_bytes=lambda given: nbytes_of(given.logits),
        compared=lambda _, answers: answers[:, Answer.TOKEN],
    )


def _draw(recipe: Recipe, vocab: int, rows: int, generator: Generator) -> Draw:
    words = torch.zeros(rows, len(Word), dtype=torch.int64)
    floats = words.view(torch.float64)
    words[:, Word.FLAGS] = int(recipe.flags)
    floats[:, Word.TEMPERATURE] = recipe.temperature
    floats[:, Word.CUT] = float("-inf")
    floats[:, Word.TOP_P] = recipe.top_p
    words[:, Word.TOP_K] = recipe.top_k
    floats[:, Word.REPETITION] = 1.1 if recipe.penalties else 1.0
    words[:, Word.SEED] = torch.arange(rows) + 1234
    words[:, Word.POSITION] = torch.arange(rows) + 77
    words[:, Word.NUM_TOP] = recipe.num_top
    seen = min(vocab // 2, 512) if recipe.penalties else 0
    words[:, Word.HISTORY_START] = torch.arange(rows) * seen
    words[:, Word.HISTORY_END] = (torch.arange(rows) + 1) * seen
    history = [torch.randperm(vocab, generator=generator)[:seen] for _ in range(rows)]
    batch = Batch(
        rows=words,
        bias_ids=torch.zeros(1, dtype=torch.int32),
        bias=torch.zeros(1, dtype=torch.float64),
        history_ids=torch.cat([*history, torch.zeros(1, dtype=torch.int64)]).to(torch.int32),
        history_counts=torch.ones(rows * seen + 1, dtype=torch.int32),
        masks=torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32),
    )
    return Draw(4 * torch.randn(rows, vocab, generator=generator), batch)


def _bandwidth(words: int) -> BenchCase:
    return BenchCase(
        op="bandwidth",
        shape=f"{4 * words} bytes",
        rows=1,
        format="int32",
        work=Work(
            lambda generator: torch.randint(-(2**31), 2**31, (words,), generator=generator, dtype=torch.int32),
            lambda given, how: read(given, implementation=how),
        ),
        moved_bytes=nbytes_of,
        compared=lambda _, sums: sums.sum().remainder(2**32),
    )
