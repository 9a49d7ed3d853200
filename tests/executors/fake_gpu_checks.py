"""What the host does for a GPU, checked without one: `python -m tests.executors.fake_gpu_checks FOLDER`.

A child of test_fake_gpu.py, since kernels must not be interpreted here. Every family and every format of weights and
cache is loaded onto a GPU that is not there, its graphs are captured and a few steps run. Prints a line of JSON for
each. What the fake finds wrong ends it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from edgelm.core import LAST, Chunk, SamplingParams, Sequence, Step
from edgelm.executors.graphs import SIZES
from edgelm.executors.torch import TorchExecutor, TorchOptions
from edgelm.kernels.cache import BLOCK_LEN, FORMATS
from edgelm.models.config import read_config
from edgelm.models.decoder import Decoder
from edgelm.models.load import load
from edgelm.weights.gguf import open_gguf
from edgelm.weights.safetensors import open_safetensors
from edgelm.weights.sources import FolderSource, GGUFSource
from tests.executors.fake_gpu import FakeGpu
from tests.models.tiny_models import MODELS, build, write
from tests.tiny import TYPES, write_tiny

CONTEXT = 256
NUM_SEQUENCES = 4
PROMPT = 40


def check(name: str, gpu: FakeGpu, decoder: Decoder, kv: str = "f16") -> None:
    """Run steps of each kind; print what they came to."""
    gpu.captured.clear()
    gpu.launches.clear()
    executor = TorchExecutor(
        decoder, TorchOptions(context=CONTEXT, capacity=CONTEXT * NUM_SEQUENCES, kv=kv, max_sequences=NUM_SEQUENCES)
    )
    decoding = len([size for size in SIZES if size <= NUM_SEQUENCES])
    compiled = set(gpu.launches)
    num_graphs = decoding + len(SIZES) - 1
    assert len(gpu.captured) == 2 * num_graphs  # of the model, of the sampler
    for kind, step, replayed in _steps():
        gpu.copies.clear()
        gpu.launches.clear()
        gpu.blocking, replays = 0, gpu.replays
        executor.forward(step)
        assert (not gpu.launches) == replayed, f"{kind}: {gpu.launches}"
        samples = executor.sample(step, _masks(executor, step) if kind == "masked" else None)
        assert gpu.blocking == 0, f"{kind}: the host waits for the device"
        alone = kind == "penalized"  # the sampler's graph is for rows without penalties
        assert gpu.replays - replays == (2 - alone) * replayed, kind
        assert (not gpu.launches) == (replayed and not alone), f"{kind}: {gpu.launches}"
        if alone:
            assert gpu.launches.keys() >= {"bias_kernel", "penalize_kernel"}
        assert gpu.copies["down"] == 1, f"{kind}: {gpu.copies}"
        assert gpu.copies["up"] == {"masked": 3, "penalized": 6}.get(kind, 2), f"{kind}: {gpu.copies}"
        samples.read()
        assert gpu.copies["down"] == 1
        assert gpu.launches.keys() <= compiled, f"{kind}: a kernel is compiled while somebody waits"
    executor.close()
    kernels = sum(gpu.captured[num_graphs - 1].values())  # of the smallest
    sampling = sorted(gpu.captured[-1])
    print(json.dumps({"name": name, "kv": kv, "kernels": kernels, "sampling": sampling}), flush=True)


def find_faults() -> None:
    """Do what a step must not do; each is found."""

    @triton.jit
    def kernel(x_ptr):
        tl.store(x_ptr, 1)

    def capture(what: Callable[[], object]) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            what()

    with FakeGpu() as gpu:
        there, here = torch.zeros(4, device="cuda"), torch.zeros(4)
        faults: list[Callable[[], object]] = [
            lambda: there.sum().item(),
            there.tolist,
            lambda: bool(there[0]),
            lambda: there + here,
            lambda: there.index_select(0, torch.tensor([1])),
            lambda: kernel[(1,)](here),
            lambda: kernel[(0,)](there),
            lambda: capture(lambda: there.copy_(here)),
            lambda: capture(lambda: torch.tensor([1], device="cuda")),
            lambda: capture(lambda: torch.cuda.Event().synchronize()),
            lambda: capture(there.cpu),
        ]
        for number, fault in enumerate(faults):
            gpu._capturing = None
            try:
                fault()
            except (AssertionError, RuntimeError):
                continue
            sys.exit(f"fault {number} was not found")
        gpu._capturing = None
        kernel[(1,)](there)
        there.cpu()
        there.copy_(here, non_blocking=True)
        assert (gpu.launches, gpu.blocking, gpu.copies) == ({"kernel": 1}, 1, {"up": 1, "down": 1})


def _steps() -> Iterator[tuple[str, Step, bool]]:
    """Yield kinds of steps, and whether a graph is replayed for them."""
    seqs = [Sequence(i, [5] * PROMPT, PROMPT, SamplingParams(seed=i, num_logprobs=i)) for i in range(NUM_SEQUENCES)]
    tables = [tuple(range(i * 8, i * 8 + CONTEXT // BLOCK_LEN)) for i in range(NUM_SEQUENCES)]

    def step(position: int, tokens: list[int], rows: int, *, only: int = NUM_SEQUENCES) -> Step:
        return Step(tuple(Chunk(seq, position, tokens, rows, tables[seq.id]) for seq in seqs[:only]))

    yield "prompts", step(0, [5] * PROMPT, 1), False
    yield "decoding", step(PROMPT, [6], 1), True
    yield "ahead", step(PROMPT + 1, [LAST], 1), True
    yield "ahead of fewer", step(PROMPT + 2, [LAST], 1, only=3), True
    yield "verifying", step(PROMPT + 3, [7] * 4, 4), True
    yield "verifying one", step(PROMPT + 7, [7] * 11, 11, only=1), True
    yield "masked", step(PROMPT + 18, [8], 1, only=2), True
    yield "more than a graph", step(PROMPT + 19, [8] * 5, 5), False
    yield "one token of a prompt", step(PROMPT + 24, [9], 1, only=1), True
    heavy = SamplingParams(repetition_penalty=1.1, logit_bias=((3, 2.0),))
    seq = Sequence(9, [5] * (PROMPT + 26), PROMPT, heavy)
    yield "penalized", Step((Chunk(seq, PROMPT + 25, [9], 1, tables[0]),)), True


def _masks(executor: TorchExecutor, step: Step) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.full((step.num_rows, (executor.info.num_vocab + 31) // 32), 5, np.int32)


def main(folder: Path) -> None:
    """Check everything."""
    find_faults()
    for name in MODELS:
        write(build(name), folder / name)
    for quant in TYPES:
        write_tiny(folder / f"{quant}.gguf", quant=quant, width=256, heads=4, kv_heads=2, head_dim=64, ffn=256)
    for name in MODELS:
        settings = json.loads((folder / name / "config.json").read_text())
        with FakeGpu() as gpu, open_safetensors(folder / name) as model:
            source = FolderSource(model, settings)
            check(name, gpu, load(read_config(settings), source, "cuda", torch.bfloat16, "triton", context=CONTEXT))
    for quant in TYPES:
        with FakeGpu() as gpu, open_gguf(folder / f"{quant}.gguf") as gguf:
            config = read_config(gguf.metadata)
            decoder = load(config, GGUFSource(gguf), "cuda", torch.bfloat16, "triton", context=CONTEXT)
            for kv in FORMATS if quant == "q8_0" else ["f16"]:
                check(quant, gpu, decoder, kv)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
