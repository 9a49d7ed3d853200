"""Whole models through emulated kernels: their tokens are those of the reference on the CPU.

    python -m tests.kernels.emulated.models [--main] [--capability N...] [--only WORD...] [--append FILE]

Each line of JSON is one model with one KV format on one architecture. Two sequences run through the project's own
executor: prompts in chunks and beside each other, decoding, LAST tokens, drafts of which one is wrong; one is greedy,
the other sampled with a temperature and penalties. Equal launches run once. The exit code is 1 if a result is wrong.
With --append, the lines go to the end of a file, and what it has is left out, if it is of the present kernels.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.core import LAST, Chunk, SamplingParams, Sequence, Step
from edgelm.kernels import layout
from edgelm.kernels.cache import BLOCK_LEN, FORMATS
from edgelm.models.decoder import Decoder
from edgelm.sampling.device import DeviceSampler
from edgelm.sampling.history import History
from edgelm.sampling.host import first_position
from edgelm.sampling.reference import sample
from tests.backends.torch.torch_engine import load_gguf
from tests.kernels.emulated.case import filled_memory, launched_late
from tests.kernels.emulated.model_weights import tensors_of
from tests.kernels.emulated.outcome import Outcome, within
from tests.kernels.emulated.records import Records, collecting_by_hand
from tests.kernels.error_bounds import product_bound
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_models import MODELS, VOCAB, build, text

ARCHITECTURES = (90, 89)
CONTEXT = 128
# a Llama with biases, a Gemma with windows, soft caps and norms after blocks, a mixture of experts
FAMILIES = {"llama": "llama3", "gemma": "gemma2", "mixture": "mixtral"}
MAIN = (
    ("gemma", "k6v4", 89),
    ("mixture", "int8", 90),
)  # a mixture of experts is a Llama but for its feed-forward block
PROMPTS = 90, 20
FIRST = 70  # tokens of the longer prompt in the first step: more than decode kernels take
NUM_DECODED = 2
DRAFT = 4  # tokens, of which the third is wrong
# of the greedy and of the other sequence: the first seeds whose answers are clear
SEEDS = {
    "llama k6v4": (11, 11), "llama k8v4": (23, 1), "llama fp8": (1, 2), "llama int8": (2, 2), "llama f16": (2, 2),
    "gemma k6v4": (383, 383), "gemma k8v4": (107, 107), "gemma fp8": (448, 448), "gemma int8": (8, 8),
    "gemma f16": (8, 8), "mixture k6v4": (229, 229), "mixture k8v4": (20, 14), "mixture fp8": (88, 586),
    "mixture int8": (14, 14), "mixture f16": (5, 5),
}  # fmt: skip
MOST_SEEDS = 1500
VARIETY = 6  # different tokens, at least, in both answers
TRIALS = 4
NOISE = 1.5  # random errors that change no token, in those that the reference makes by computing in bfloat16
TIMES = 3  # the error that is allowed, in those that the reference makes by computing in bfloat16


class ModelCase(NamedTuple):
    """A model with one KV format."""

    family: str
    kv: str

    @property
    def name(self) -> str:
        return f"{self.family} {self.kv}"


@dataclass
class Trace:
    """The tokens of each sequence, the logits of each sampled row, and what each token was sampled by."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    sampled: list[tuple[SamplingParams, int, list[int], int]] = field(default_factory=list)
    products: list[Outcome] = field(default_factory=list)  # of the output matrix


class EmulatedExecutor(TorchExecutor):
    """The executor as it is on a GPU without graphs: it samples by kernels."""

    def __init__(self, decoder: Decoder, options: TorchOptions) -> None:
        super().__init__(decoder, options)
        self._device_sampler = DeviceSampler(decoder.vocab_size, options.max_rows, decoder.device, "triton")


class Walk:
    """Two sequences, step by step. `answer`: the tokens of the greedy sequence, of which drafts are made."""

    def __init__(self, executor: TorchExecutor, seeds: tuple[int, int], answer: Seq[int] = ()) -> None:
        greedy = SamplingParams(temperature=0.0)
        warm = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1, seed=seeds[1], num_logprobs=2)
        self.executor = executor
        self.answer = answer
        self.seqs = [
            Sequence(number, text(length, 1000 * seeds[number] + number), length, params)
            for number, (length, params) in enumerate(zip(PROMPTS, (greedy, warm), strict=True))
        ]
        blocks = CONTEXT // BLOCK_LEN
        order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(7)).tolist()
        self.tables = [tuple(order[:blocks]), tuple(order[blocks:])]
        self.trace = Trace([[], []])

    def run(self) -> Trace:
        first, second = self.seqs
        self.step(self.chunk(first, FIRST, rows=0))
        self.step(self.chunk(first, PROMPTS[0] - FIRST), self.chunk(second, PROMPTS[1]))
        for _ in range(NUM_DECODED):
            self.step(self.chunk(first, 1), self.chunk(second, 1))
        self.step(*(self.chunk(seq, 1, last=True) for seq in self.seqs))
        for _ in range(1 if self.answer else 4):
            draft = self.draft()
            self.step(self.chunk(first, 1, draft=draft), self.chunk(second, 1))
        return self.trace

    def draft(self) -> list[int]:
        """Return the next tokens of the answer, the third of them wrong."""
        done = self.seqs[0].completion_len
        draft = list(self.answer[done : done + DRAFT])
        if len(draft) > 2:
            draft[2] = (draft[2] + 1) % VOCAB
        return draft

    def chunk(self, seq: Sequence, count: int, *, rows: int = 1, draft: Seq[int] = (), last: bool = False) -> Chunk:
        """Return the next `count` tokens, and the draft after them."""
        start = seq.computed
        tokens = [LAST] if last else [*seq.tokens[start : start + count], *draft]
        return Chunk(seq, start, tokens, rows + len(draft), self.tables[seq.id])

    def step(self, *chunks: Chunk) -> None:
        """Run a step, and take over its tokens as a scheduler does."""
        step = Step(chunks)
        self.executor.forward(step)
        logits = self.executor.logits(step).copy()
        sampled = self.executor.sample(step, None).read()
        row = 0
        for chunk, samples in zip(chunks, sampled, strict=True):
            seq = chunk.seq
            tokens = [one.id for one in samples]
            for at, token in enumerate(tokens):
                self.trace.logits.append(logits[row + at])
                self.trace.sampled.append((seq.params, first_position(chunk) + at, [*seq.tokens, *tokens[:at]], token))
            row += chunk.rows
            seq.computed = chunk.start + len(chunk.tokens) - max(chunk.rows - len(tokens), 0)
            seq.tokens += tokens
            self.trace.tokens[seq.id] += tokens


@contextmanager
def judged_products(decoder: Decoder, outcomes: list[Outcome]) -> Iterator[None]:
    """Compare each product of the last hidden states and the output matrix with the exact one."""
    multiply = decoder.logits
    values = layout.dequantize(decoder.weights.output.weight).double()

    def judged(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = multiply(hidden, out)
        x = hidden.to(decoder.dtype)
        exact = x.double() @ values.T
        bound = product_bound(x, values, offsets=True)
        if cap := decoder.config.final_softcap:
            exact = cap * torch.tanh(exact / cap)
            bound = bound + 2e-6 * exact.abs()
        outcomes.append(within(logits, exact, bound))
        return logits

    with patch.object(decoder, "logits", judged):
        yield


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="edgelm-emulated-"))


@cache
def path_of(family: str) -> Path:
    """Write a tiny model of two layers with random weights, in several formats as real files have."""
    name = FAMILIES[family]
    model = build(name, **({} if "num_hidden_layers" in MODELS[name][1] else {"num_hidden_layers": 2}))
    return write_gguf(model, folder() / f"{family}.gguf", _kind)


def _kind(tensor: str) -> Kind:
    if "attn_v" in tensor or "down" in tensor:
        return Kind.Q8_0
    return Kind.Q5_0 if "embd" in tensor or tensor.startswith("output") else Kind.Q4_0


@cache
def decoder_of(family: str, implementation: str, dtype: torch.dtype) -> Decoder:
    return load_gguf(path_of(family), implementation, dtype)


def walk(
    case: ModelCase,
    seeds: tuple[int, int],
    implementation: str,
    answer: Seq[int] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> Trace:
    """Run the sequences of two seeds."""
    kind = EmulatedExecutor if implementation == "triton" else TorchExecutor
    options = TorchOptions(
        context=CONTEXT,
        capacity=2 * CONTEXT,
        kv=case.kv,
        max_sequences=2,
        max_tokens=FIRST,
        graphs=False,
        runs_ahead=False,
    )
    decoder = decoder_of(case.family, implementation, dtype)
    executor = kind(decoder, options)
    try:
        taken = Walk(executor, seeds, answer)
        with judged_products(decoder, taken.trace.products):
            return taken.run()
    finally:
        executor.close()


class Errors(NamedTuple):
    """The distance between two traces: of all logits, relative to them, and of the worst, relative to its row."""

    mean: float  # root mean square
    largest: float


class Reference(NamedTuple):
    """The answers of the reference, and the error that bfloat16 makes in it."""

    seeds: tuple[int, int]
    answer: list[int]  # drafts are made of it
    trace: Trace
    rounding: Errors


@cache
def reference(case: ModelCase) -> Reference:
    """Return the answers of the first seeds whose tokens are clear, each sequence's by itself."""
    if case.name in SEEDS:
        known, is_clear = _reference(case, SEEDS[case.name])
        if all(is_clear):
            return known
    found: list[int] = []
    for number in range(2):
        for seed in range(MOST_SEEDS):
            seeds = (seed, seed) if number == 0 else (found[0], seed)
            known, is_clear = _reference(case, seeds)
            if is_clear[number] and all(is_clear[: number + 1]):
                found.append(seed)
                break
        else:
            raise AssertionError(f"{case.name}: no seed of {MOST_SEEDS} has a clear answer")
    return known


def _reference(case: ModelCase, seeds: tuple[int, int]) -> tuple[Reference, tuple[bool, bool]]:
    """Return the answers of two seeds, and which of them are clear.

    An answer is clear if float32 gives the same tokens, and so do logits with random errors. The first one must be the
    same with drafts and without.
    """
    plain = walk(case, seeds, "reference")
    answer = plain.tokens[0]
    drafted = walk(case, seeds, "reference", answer)
    exact = walk(case, seeds, "reference", answer, torch.float32)
    rounding = errors(drafted, exact)
    known = Reference(seeds, answer, drafted, rounding)
    if drafted.tokens[0] != answer[: len(drafted.tokens[0])] or rounding.mean == float("inf"):
        return known, (False, False)
    first, second = (
        drafted.tokens[number] == exact.tokens[number] and clear(drafted, number, NOISE * rounding.mean, seeds[number])
        for number in range(2)
    )
    return known, (first, second and len({*plain.tokens[0], *plain.tokens[1]}) >= VARIETY)


def clear(trace: Trace, number: int, error: float, seed: int) -> bool:
    """Return whether random errors of this size, relative to the logits, change no token of a sequence."""
    rng = np.random.default_rng(seed)
    for logits, (params, position, tokens, token) in zip(trace.logits, trace.sampled, strict=True):
        if (params.temperature > 0) != bool(number):
            continue
        size = error * float(np.sqrt(np.mean(logits**2)))
        for _ in range(TRIALS):
            moved = (logits + size * rng.standard_normal(logits.shape)).astype(np.float32)
            if sample(moved, params, position, History(tokens)).id != token:
                return False
    return True


def errors(got: Trace, expected: Trace) -> Errors:
    """Return the distance of logits from those of other logits."""
    if len(got.logits) != len(expected.logits):
        return Errors(float("inf"), float("inf"))
    one, other = (torch.from_numpy(np.stack(trace.logits)).double() for trace in (got, expected))
    off: Tensor = (one - other).nan_to_num(float("inf"))
    sizes = other.square().mean(1, keepdim=True).sqrt()
    return Errors(float(off.norm() / other.norm()), float((off.abs() / sizes).max()))


class ModelResult(NamedTuple):
    """The result of emulating a model."""

    case: ModelCase
    capability: int
    fault: str
    tokens: list[list[int]]
    errors: Errors
    bounds: Errors
    product: Outcome  # the worst of the products with the output matrix
    launches: int
    replayed: int  # launches of them that were equal to earlier ones and did not run again
    instructions: int
    kernels: tuple[str, ...]
    seconds: float


def emulate(case: ModelCase, capability: int, **options: Any) -> ModelResult:
    """Run a model on an emulated GPU and compare it with the reference."""
    from tests.kernels.ptx.errors import EmulatorError
    from tests.kernels.ptx.launch import Emulated

    seeds, answer, expected, rounding = reference(case)
    began = time.perf_counter()
    fault, got = "", Trace([[], []])
    weights = tensors_of(decoder_of(case.family, "triton", torch.bfloat16).weights)
    versions = [weight._version for weight in weights]
    with Emulated(capability, weights=weights, **options) as gpu, filled_memory():
        try:
            got = walk(case, seeds, "triton", answer)
        except EmulatorError as error:
            fault = f"{type(error).__name__}: {error}"
    assert versions == [weight._version for weight in weights], "torch has written a weight"
    off, bounds = errors(got, expected), Errors(TIMES * rounding.mean, TIMES * rounding.largest)
    product = max(got.products, default=Outcome(float("inf"), 0.0, "no logits"), key=lambda outcome: outcome.difference)
    faults = [fault, *(outcome.fault for outcome in got.products)]
    faults += [f"{kernel} is launched without PDL" for kernel in launched_late(gpu)]
    if not fault and got.tokens != expected.tokens:
        faults.append(f"tokens {got.tokens}, not {expected.tokens}")
    if off.mean > bounds.mean or off.largest > bounds.largest:
        faults.append(f"logits are off by {off}, allowed is {bounds}")
    return ModelResult(
        case,
        capability,
        "; ".join(filter(None, faults)),
        got.tokens,
        off,
        bounds,
        product,
        len(gpu.launches),
        sum(launch.replayed for launch in gpu.launches),
        sum(launch.instructions for launch in gpu.launches if not launch.replayed),
        tuple(dict.fromkeys(launch.kernel for launch in gpu.launches)),
        time.perf_counter() - began,
    )


def cases() -> list[ModelCase]:
    return [ModelCase(family, kv) for family in FAMILIES for kv in FORMATS]


def fields(result: ModelResult) -> dict[str, Any]:
    """Return a result as JSON has it."""
    values = result._asdict() | {"case": result.case.name, "product": result.product.difference}
    return values | {"product_bound": result.product.bound, "seconds": round(result.seconds, 1)}


def main(arguments: Seq[str] | None = None) -> int:
    assert "TRITON_INTERPRET" not in os.environ, "kernels that are interpreted are not compiled"
    from tests.kernels.ptx.launch import forget
    from tests.kernels.ptx.replay import Launches

    parser = argparse.ArgumentParser(prog="python -m tests.kernels.emulated.models", description=(__doc__ or "")[:80])
    parser.add_argument("--main", action="store_true", help="only the models of every test run")
    parser.add_argument("--capability", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", metavar="WORD")
    parser.add_argument("--append", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    records = Records(options.append, ("case", "capability"))
    faults = 0
    for case in cases():
        if options.only and not any(word in case.name for word in options.only):
            continue
        known = Launches()
        forget()
        for capability in options.capability:
            if (options.main and (*case, capability) not in MAIN) or records.has(case.name, capability):
                continue
            result = emulate(case, capability, known=known)
            faults += bool(result.fault)
            records.add(fields(result))
    return int(faults > 0)


if __name__ == "__main__":
    with collecting_by_hand():
        status = main()
    sys.exit(status)
