"""The rule of `--repeatable` in llama.cpp: equal requests get equal bits, whatever was cached, drafted or runs beside.

The bits of a number depend on three things in ggml's kernels for processors, and the rule removes each:

    attention      without flash attention one row differs from several; with 16-bit keys and values flash attention
                   splits the cache between threads from 512 cells on, and tiles 64 rows. So keys have 8 bits.
    order of cells sums go by cells, and freed ones are filled again. So each sequence has cells of its own.
    matrices       some kernels multiply several rows otherwise than one. So a micro-batch has no more rows than were
                   seen to equal one row, with the weights repacked or as they are in the file.

Owns the KV modes and that measurement, which is kept. Knows nothing of requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.errors import ModelError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.facts import machine_key
from edgelm.base.sampling import SamplingParams
from edgelm.checkpoints.files import file_identity
from edgelm.engine.core import Chunk, Step, Trim
from edgelm.engine.core import Sequence as Request

if TYPE_CHECKING:
    from edgelm.backends.llama.adapter import LlamaAdapter

VERSION = 1  # of the measurement
PREFIX_LEN = 40  # tokens before the compared rows
NUM_ROWS = 16  # compared ones
SIZES = (2, 3, 4, 5, 6, 7, 8, 13, 16, 64, 128)  # of chunks
MOST_ROWS = SIZES[-1]
CONTEXT = 512


class Rule(NamedTuple):
    """How a model is loaded, and the rows of a micro-batch."""

    repack: bool
    rows: int


def rule_for(
    load: Callable[[bool], LlamaModel],
    options: LlamaOptions,
    files: Sequence[Path],
    adapters: Sequence[LlamaAdapter],
    folder: Path,
    *,
    repack: bool,
) -> Rule:
    """Return the rule of a model from a file in `folder`, or measure it: `load` loads the model, repacked or not.

    `adapters` are those that `load` applies.

    Raises the errors of `load`, and ModelError for a model that cannot be repeatable.
    """
    cores = usable_cores()
    facts = VERSION, machine_key(cores), options.kv, repack, [adapter.state_fact for adapter in adapters]
    digest = hashlib.sha256(repr(facts).encode())
    for part in file_identity(files):
        digest.update(part)
    path = folder / f"{digest.hexdigest()[:32]}.json"
    rule = _kept(path)
    if rule is None:
        rule = _best_of(load, options, repack=repack)
        atomic_json(path, rule)
    if rule.rows == 1:
        raise ModelError(
            "--repeatable is not for this model: llama.cpp computes one row of its weights otherwise than two",
            "take a quantized GGUF, such as Q8_0 or Q4_0, or omit --repeatable",
        )
    return rule


def _kept(path: Path) -> Rule | None:
    match read_json(path, 100):
        case [bool(repack), int(rows)] if 1 <= rows <= MOST_ROWS:
            return Rule(repack, rows)
    return None


def _best_of(load: Callable[[bool], LlamaModel], options: LlamaOptions, *, repack: bool) -> Rule:
    rules = []
    for repacked in (True, False) if repack else (False,):
        rules.append(Rule(repacked, _measured(load(repacked), options)))
        if rules[-1].rows == MOST_ROWS:
            break
    return max(rules, key=lambda rule: rule.rows)


def _measured(model: LlamaModel, options: LlamaOptions) -> int:
    """Measure a model, and free it."""
    if model.recurrent or model.hybrid:
        model.close()
        raise ModelError("--repeatable is not for models with recurrent states", "omit it, or take another model")
    context = min(CONTEXT, options.context)
    small = replace(options, context=context, max_sequences=2, repeatable_rows=MOST_ROWS)
    try:
        executor = LlamaExecutor(model, small)
    except ModelError:
        model.close()
        raise
    try:
        return equal_rows(executor)
    finally:
        executor.close()


def equal_rows(executor: LlamaExecutor) -> int:
    """Return the most rows of a micro-batch that have the bits of one row alone. The executor has no sequences."""
    bench = _Bench(executor)
    alone = bench.rows([1] * NUM_ROWS)
    if not np.array_equal(bench.beside(), alone[0]):
        return 1
    for size, larger in pairwise((1, *SIZES)):
        if larger > min(executor.info.context - PREFIX_LEN, executor.info.max_tokens):
            return size
        if larger <= NUM_ROWS:
            count = NUM_ROWS // larger
            rows, expected = bench.rows([larger] * count), alone[: larger * count]
        else:  # its last rows, against the same behind the others
            rows, expected = bench.rows([larger]), bench.rows([larger - NUM_ROWS, *[1] * NUM_ROWS])
        if not np.array_equal(rows[-len(expected) :][-NUM_ROWS:], expected[-NUM_ROWS:]):
            return size
    return MOST_ROWS


class _Bench:
    """Computes the same tokens in chunks of several sizes, behind a prefix in slot 0."""

    def __init__(self, executor: LlamaExecutor) -> None:
        self._executor = executor
        vocab = executor.info.num_vocab
        self._tokens = [(vocab // 3 + 977 * i) % vocab for i in range(PREFIX_LEN + MOST_ROWS)]
        self._request = Request(-1, [0], 1, SamplingParams(temperature=0))
        self._forward(self._chunk(0, PREFIX_LEN, 0))

    def rows(self, sizes: list[int]) -> NDArray[np.float32]:
        """Return the logits of the last NUM_ROWS rows at most of each chunk, of chunks one after the other."""
        return np.concatenate(list(self._chunks(sizes)))

    def beside(self) -> NDArray[np.float32]:
        """Return the logits of the first row, computed beside one of another sequence."""
        self._forward(self._chunk(0, PREFIX_LEN, 0, slot=1))
        logits = self._forward(self._chunk(PREFIX_LEN, 1, 1, slot=1), self._chunk(PREFIX_LEN, 1, 1))
        self._executor.forward(Step((), (Trim(1, 0), Trim(0, PREFIX_LEN))))
        first, second = logits
        return first if np.array_equal(first, second) else np.zeros_like(first)

    def _chunks(self, sizes: list[int]) -> Iterator[NDArray[np.float32]]:
        start = PREFIX_LEN
        for size in sizes:
            yield self._forward(self._chunk(start, size, min(size, NUM_ROWS)))
            start += size
        self._executor.forward(Step((), (Trim(0, PREFIX_LEN),)))

    def _chunk(self, start: int, size: int, rows: int, slot: int = 0) -> Chunk:
        return Chunk(self._request, start, self._tokens[start : start + size], rows, slot)

    def _forward(self, *chunks: Chunk) -> NDArray[np.float32]:
        step = Step(chunks)
        self._executor.forward(step)
        return self._executor.logits(step).copy()
