"""Two sequences that run through the project's executor, over a tiny model: prompts, decoding, LAST tokens, drafts.

Owns the models and the steps. Knows nothing of what is right: the same walk is one of kernels or of plain torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.backends.torch.sampler import DeviceSampler
from edgelm.engine.core import LAST, Chunk, SamplingParams, Sequence, Step
from edgelm.engine.sampling.host import first_position
from edgelm.kernels import layout
from edgelm.kernels.cache import BLOCK_LEN
from edgelm.models.decoder import Decoder
from tests.backends.torch.torch_engine import load_gguf
from tests.kernels.emulated.outcome import Outcome, within
from tests.kernels.error_bounds import product_bound
from tests.models.tiny_gguf import write_gguf
from tests.models.tiny_models import MODELS, VOCAB, build, text

CONTEXT = 128
# a Llama with biases, a Gemma with windows, soft caps and norms after blocks, a mixture of experts
FAMILIES = {"llama": "llama3", "gemma": "gemma2", "mixture": "mixtral"}
PROMPTS = 90, 20
FIRST = 70  # tokens of the longer prompt in the first step: more than decode kernels take
NUM_DECODED = 2
DRAFT = 4  # tokens, of which the third is wrong


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

    def judged(hidden: Tensor, *place: Tensor | None) -> Tensor:
        logits = multiply(hidden, *place)
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
