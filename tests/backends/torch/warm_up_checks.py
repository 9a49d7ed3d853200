"""Check on a fake GPU that loading compiles and allocates all that requests need.

    python -m tests.backends.torch.warm_up_checks [--all] [MODEL ..]

test_warm_up.py runs this as a child process, where kernels are not interpreted. For each model and each number of
sequences it loads an executor, then runs steps of many shapes, saves and loads a whole context, and prints a line of
JSON with the first faults: kernels that a GPU would compile during a request, and steps in which more memory is alive
than at any moment of loading.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from edgelm.backends.followed_heads import Followed
from edgelm.backends.snapshots import SnapshotStore
from edgelm.backends.torch.executor import MAX_ROWS, TorchExecutor, TorchOptions
from edgelm.engine.core import Chunk, Drop, Load, SamplingParams, Save, Sequence, Step
from edgelm.kernels.attention import VERIFY_LEN
from edgelm.kernels.cache import BLOCK_LEN
from tests.backends.torch.fake_gpu import FakeGpu
from tests.backends.torch.shape_models import MODELS, head_of

MAX_TOKENS = 1024  # of a step: a prompt of 2,048 tokens is two of them
COPY_BYTES = 2**23  # that saving or loading a conversation may take, however long it is
PLAIN = SamplingParams()
HEAVY = SamplingParams(repetition_penalty=1.1, logit_bias=((3, 1.0),), num_logprobs=2)
# each model with sequences, context, KV format and graphs; the first settings of a model are those of `make test`
SETTINGS = {
    "llama_8b": [(1, 8192, "f16", True), (64, 131072, "k8v4", True), (8, 32768, "int8", False)],
    "qwen_bf16": [(64, 2048, "f16", True), (1, 32768, "f16", False)],
    "small_f16": [(3, 2048, "f16", True), (64, 2048, "fp8", False)],
    "qwen_experts": [(8, 8192, "k6v4", True), (1, 32768, "f16", True), (64, 4096, "f16", False)],
    "gpt_oss": [(2, 131072, "f16", True), (64, 8192, "f16", True)],
    "gemma": [(40, 8192, "f16", False), (1, 8192, "int8", True)],
}
HEADS = {"llama_8b": "Q4_K", "qwen_experts": "Q4_K"}  # models with a head that predicts ahead


def prompt_lengths(thorough: bool) -> list[int]:
    """Return lengths of prompts, or some of them with all at which a launch may change."""
    if thorough:
        return list(range(1, MAX_TOKENS + 1))
    borders = chain((16, 32, 48, 64, 80, 96, 112, 128, 256, 272, 384, 512, 768, 1024), (9, 25, 37, 100, 300, 777))
    near = {length + off for length in borders for off in ((-1, 0, 1) if length % 16 == 0 else (0,))}
    return sorted(length for length in near | set(range(1, 9)) if length <= MAX_TOKENS)


def steps(max_sequences: int, context: int, thorough: bool) -> Iterator[Step]:
    """Yield prompts, decoding, verification, and steps with all of them, of every size."""
    blocks = tuple(range(-(-context // BLOCK_LEN)))

    def chunk(count: int, rows: int = 1, start: int = 0, params: SamplingParams = PLAIN) -> Chunk:
        seq = Sequence(0, [0], 1, params)
        return Chunk(seq, start, [0] * count, rows, blocks[: -(-(start + count) // BLOCK_LEN)])

    for length in prompt_lengths(thorough):
        start = (0, context - length)[length % 5 == 0]
        yield Step((chunk(length, int(length % 7 > 0), start),))
    some = {1, 2, 9, 17, 33, max_sequences} & set(range(max_sequences + 1))
    for count in range(1, max_sequences + 1) if thorough else sorted(some):
        start = (0, context - 64)[count % 2]
        yield Step((chunk(1, 1, start),) * count)
        yield Step((chunk(1, 1, start, HEAVY),) * count)
        for query_len in range(2, VERIFY_LEN + 1) if thorough else (2, 3, 8, 16):
            if query_len * count <= MAX_ROWS:
                yield Step((chunk(query_len, query_len, start, HEAVY if query_len == 3 else PLAIN),) * count)
        for tokens in (17, 100, 900, MAX_TOKENS):
            if tokens >= count:  # as many prompts, a prompt beside those that decode, and with verification
                yield Step((chunk(tokens // count, 1, start if tokens < count * 64 else 0),) * count)
            if tokens - count > 5 and count > 1:
                yield Step((chunk(tokens - count), *[chunk(1, 1, start)] * (count - 1)))
                others = [chunk(5, min(MAX_ROWS - count + 2, 5)), *[chunk(1, 1, 0, HEAVY)] * (count - 2)]
                yield Step((chunk(min(tokens - count, 900), 0), *others))


def long_histories(max_sequences: int, context: int, num_vocab: int) -> Iterator[Step]:
    """Yield steps of sequences whose prompts and biases have nearly all tokens of the context, or of the vocabulary."""
    length = min(context - 64, num_vocab)
    blocks = tuple(range(-(-context // BLOCK_LEN)))
    biases = tuple((token, 1.0) for token in range(length))
    for params in (HEAVY, replace(HEAVY, logit_bias=biases)):
        seqs = [Sequence(number, list(range(length)), length, params) for number in range(min(max_sequences, 4))]
        for rows in (1, VERIFY_LEN):
            yield Step(tuple(Chunk(seq, length, [0] * rows, rows, blocks) for seq in seqs))


def snapshots(context: int) -> Iterator[Step]:
    """Yield steps that save the blocks of a whole context, and load them again."""
    blocks = tuple(range(context // BLOCK_LEN))
    yield Step((), (Save(blocks, 1),))
    yield Step((), (Load(1, blocks, 0), Drop(1)))


def check(name: str, num_sequences: int, context: int, kv: str, graphs: bool, thorough: bool) -> None:
    """Load a model, run the steps, and print what they compile and allocate."""
    with FakeGpu() as gpu, torch.inference_mode():
        decoder = MODELS[name]()
        capacity = context * min(num_sequences, 2)
        executor = TorchExecutor(
            decoder,
            TorchOptions(
                context=context, capacity=capacity, kv=kv, max_sequences=num_sequences, max_tokens=MAX_TOKENS,
                graphs=graphs,
            ),
            SnapshotStore(2**30),
            head=head_of(decoder, HEADS[name]) if name in HEADS else None,
        )  # fmt: skip
        num_compiled, peak = len(gpu.compiled), gpu.peak_bytes
        faults: list[str] = []
        if alone := sorted({kernel for kernel, key in gpu.compiled if (kernel, key) not in gpu.ahead}):
            faults.append(f"loading compiles one by one: {', '.join(alone)}")
        num_steps = num_copied = 0
        work = chain(
            steps(num_sequences, context, thorough),
            long_histories(num_sequences, context, decoder.vocab_size),
            snapshots(context),
        )
        for step in work:
            gpu.peak_bytes = live = gpu.live_bytes
            before = len(gpu.compiled)
            executor.forward(step)
            executor.sample(step, None).read()
            num_steps += 1
            num_copied += len(step.ops)
            shape = f"{step.ops[0]!r:.30}, " if step.ops else ""
            shape += f"{len(step.chunks)} sequences, {step.num_tokens} tokens, {step.num_rows} rows"
            if new := sorted({kernel for kernel, _ in gpu.compiled[before:]}):
                faults.append(f"{shape}: compiles {', '.join(new)}")
            if gpu.peak_bytes > peak:
                faults.append(f"{shape}: {gpu.peak_bytes - peak:,} more bytes than at loading")
            if step.ops and gpu.peak_bytes - live > COPY_BYTES:
                faults.append(f"{shape}: {gpu.peak_bytes - live:,} bytes for a copy")
        heads: Any = executor.heads
        for rows in range(1, VERIFY_LEN + 1) if heads else ():
            before = len(gpu.compiled)
            heads._predict(Followed(0), [0] * rows, 0, list(heads._hidden[:1].expand(rows, -1)))
            if new := sorted({kernel for kernel, _ in gpu.compiled[before:]}):
                faults.append(f"a pass of {rows} rows through the head: compiles {', '.join(new)}")
        executor.close()
    result = {
        "model": name, "sequences": num_sequences, "context": context, "kv": kv, "graphs": graphs,
        "kernels": num_compiled, "steps": num_steps, "copies": num_copied,
        "num_faults": len(faults), "faults": faults[:8],
    }  # fmt: skip
    print(json.dumps(result), flush=True)


def main(arguments: list[str]) -> None:
    """Check the models, each with its first settings or with all of them."""
    thorough = "--all" in arguments
    names = [name for name in arguments if not name.startswith("-")] or list(MODELS)
    for name in names:
        for settings in SETTINGS[name] if thorough or "--settings" in arguments else SETTINGS[name][:1]:
            check(name, *settings, thorough)


if __name__ == "__main__":
    main(sys.argv[1:])
