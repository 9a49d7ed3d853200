"""Check the host's work for a GPU without a GPU: `python -m tests.backends.torch.fake_gpu_checks FOLDER [--all]`.

test_fake_gpu.py runs this as a child process, where kernels are not interpreted. It loads families and formats of
weights and cache, some or all, onto a fake GPU, captures its graphs and runs a few steps, and prints a line of JSON for
each. The first mistake that the fake finds ends it.
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

from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.backends.torch.graph_sizes import SIZES, graph_sizes
from edgelm.backends.torch.memory import TorchMemory
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.checkpoints.summary import model_facts
from edgelm.engine.core import LAST, Chunk, SamplingParams, Sequence, Step
from edgelm.kernels.cache import BLOCK_LEN, FORMATS
from edgelm.models.config import read_config
from edgelm.models.decoder import Decoder
from edgelm.models.loading.decoder import load
from edgelm.models.loading.sources import FolderSource, GGUFSource
from tests.backends.torch.fake_gpu import FakeGpu
from tests.backends.torch.fake_pools import GraphPools
from tests.models.tiny_models import MODELS, build, write
from tests.tiny import TYPES, write_tiny

# of every test run: plain layers, biases and windows, experts in every second layer, soft caps with norms after blocks,
# experts with biases and sinks; a weight in parts and one in whole blocks, a cache with scales and one without
SOME_FAMILIES = ("llama2", "qwen2", "qwen3_moe", "gemma2", "gpt_oss")
SOME_FORMATS = {"q8_0": ("f16", "k6v4"), "q4_k": ("f16",)}
CONTEXT = 256
NUM_SEQUENCES = 4
PROMPT = 40


def check(name: str, gpu: FakeGpu, decoder: Decoder, kv: str = "f16") -> int:
    """Run steps of each kind, and print their kernels. Return the bytes in which the graphs work."""
    gpu.captured.clear()
    gpu.launches.clear()
    gpu.pools = GraphPools()
    executor = TorchExecutor(
        decoder, TorchOptions(context=CONTEXT, capacity=CONTEXT * NUM_SEQUENCES, kv=kv, max_sequences=NUM_SEQUENCES)
    )
    compiled = set(gpu.launches)
    assert len(gpu.captured) == len(SIZES) + len(graph_sizes(NUM_SEQUENCES, 512))  # of the sampler, and of the model
    assert gpu.own_captured["copy_"] == 0, "a graph copies what it could write to its place"
    (graph_bytes,) = gpu.pools.reserved.values()  # all graphs share their memory
    for kind, step, replayed in _steps():
        gpu.copies.clear()
        gpu.launches.clear()
        gpu.own.clear()
        gpu.blocking, replays = 0, gpu.replays
        executor.forward(step)
        assert (not gpu.launches) == replayed, f"{kind}: {gpu.launches}"
        samples = executor.sample(step, _masks(executor, step) if kind == "masked" else None)
        assert gpu.blocking == 0, f"{kind}: the host waits for the device"
        alone = kind == "penalized"  # the sampler's graph is for rows without penalties
        assert gpu.replays - replays == (2 - alone) * replayed, kind
        assert (not gpu.launches) == (replayed and not alone), f"{kind}: {gpu.launches}"
        assert not gpu.own or not replayed, f"{kind}: torch computes {gpu.own} beside the graphs"
        if alone:
            assert gpu.launches.keys() >= {"bias_kernel", "penalize_kernel"}
        assert gpu.copies["down"] == 1, f"{kind}: {gpu.copies}"
        assert gpu.copies["up"] == {"masked": 3, "penalized": 6}.get(kind, 2), f"{kind}: {gpu.copies}"
        samples.read()
        assert gpu.copies["down"] == 1
        assert gpu.launches.keys() <= compiled, f"{kind}: a kernel is compiled during a request"
    waits = gpu.waits
    executor.close()
    assert gpu.waits > waits, "a graph is freed while it may still run"
    kernels = sum(gpu.captured[-1].values())  # of the smallest graph
    sampling = sorted(gpu.captured[0])
    print(json.dumps({"name": name, "kv": kv, "kernels": kernels, "sampling": sampling}), flush=True)
    return graph_bytes


def find_faults() -> None:
    """Do everything that a step must not do; the fake must find each of these faults."""

    @triton.jit
    def kernel(x_ptr):
        tl.store(x_ptr, 1)

    def capture(work: Callable[[], object]) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            work()

    with FakeGpu() as gpu:
        on_gpu, on_host = torch.zeros(4, device="cuda"), torch.zeros(4)
        faults: list[Callable[[], object]] = [
            lambda: on_gpu.sum().item(),
            on_gpu.tolist,
            lambda: bool(on_gpu[0]),
            lambda: on_gpu + on_host,
            lambda: on_gpu.index_select(0, torch.tensor([1])),
            lambda: kernel[(1,)](on_host),
            lambda: kernel[(0,)](on_gpu),
            lambda: capture(lambda: on_gpu.copy_(on_host)),
            lambda: capture(lambda: torch.tensor([1], device="cuda")),
            lambda: capture(lambda: torch.cuda.Event().synchronize()),
            lambda: capture(on_gpu.cpu),
        ]
        for number, fault in enumerate(faults):
            gpu._capturing = None
            try:
                fault()
            except (AssertionError, RuntimeError):
                continue
            sys.exit(f"fault {number} was not found")
        gpu._capturing = None
        kernel[(1,)](on_gpu)
        on_gpu.cpu()
        on_gpu.copy_(on_host, non_blocking=True)
        assert (gpu.launches, gpu.blocking, gpu.copies) == ({"kernel": 1}, 1, {"up": 1, "down": 1})


def compare_keys() -> None:
    """Launch a kernel in the ways that Triton compiles apart, and in those that it does not."""

    @triton.jit(do_not_specialize=["any_size"])
    def kernel(x_ptr, size, any_size, N: tl.constexpr):
        tl.store(x_ptr, size + any_size + N)

    with FakeGpu() as gpu:
        x, half = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda", dtype=torch.float16)
        for new, number, arguments, options in (
            (True, 1, (x, 32, 3, 5), {}),
            (False, 1, (torch.zeros(8, device="cuda"), 48, 1, 5), {}),
            (False, 1, (x[4:], 16, 16, 5), {}),
            (True, 2, (x[1:], 32, 3, 5), {}),  # not aligned to 16 bytes
            (True, 3, (x, 33, 3, 5), {}),  # not a multiple of 16
            (False, 3, (x, 7, 3, 5), {}),
            (True, 4, (x, 1, 3, 5), {}),  # one is a constant
            (True, 5, (x, 2**40, 3, 5), {}),  # of 64 bits
            (True, 6, (half, 32, 3, 5), {}),
            (True, 7, (x, 32, 3, 6), {}),
            (True, 8, (x, 32, 3, 5), {"num_warps": 8}),
            (True, 9, (x, 32, 3, 5), {"enable_fp_fusion": False}),
            (False, 9, (x, 32, 3, 5), {}),
        ):
            before = len(gpu.compiled)
            kernel[(1,)](*arguments, **options)
            assert (len(gpu.compiled) > before, len(gpu.compiled)) == (new, number), (arguments[1:], options)


def _steps() -> Iterator[tuple[str, Step, bool]]:
    """Yield each kind of step, and whether it replays a graph."""
    seqs = [Sequence(i, [5] * PROMPT, PROMPT, SamplingParams(seed=i, num_logprobs=i)) for i in range(NUM_SEQUENCES)]
    block_tables = [tuple(range(i * 8, i * 8 + CONTEXT // BLOCK_LEN)) for i in range(NUM_SEQUENCES)]

    def step(position: int, tokens: list[int], rows: int, *, only: int = NUM_SEQUENCES) -> Step:
        return Step(tuple(Chunk(seq, position, tokens, rows, block_tables[seq.id]) for seq in seqs[:only]))

    yield "prompts", step(0, [5] * PROMPT, 1), False
    yield "decoding", step(PROMPT, [6], 1), True
    yield "ahead", step(PROMPT + 1, [LAST], 1), True
    yield "ahead of fewer", step(PROMPT + 2, [LAST], 1, only=3), True
    yield "verifying", step(PROMPT + 3, [7] * 4, 4), True
    yield "verifying one", step(PROMPT + 7, [7] * 11, 11, only=1), True
    yield "masked", step(PROMPT + 18, [8], 1, only=2), True
    yield "verifying many", step(PROMPT + 19, [8] * 16, 16), True
    yield "more than a graph", step(PROMPT + 35, [8] * 17, 1), False
    yield "one token of a prompt", step(PROMPT + 52, [9], 1, only=1), True
    heavy = SamplingParams(repetition_penalty=1.1, logit_bias=((3, 2.0),))
    seq = Sequence(9, [5] * (PROMPT + 54), PROMPT, heavy)
    yield "penalized", Step((Chunk(seq, PROMPT + 53, [9], 1, block_tables[0]),)), True


def _masks(executor: TorchExecutor, step: Step) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.full((step.num_rows, (executor.info.num_vocab + 31) // 32), 5, np.int32)


def families(thorough: bool) -> list[str]:
    """Return the families that are checked."""
    return list(MODELS if thorough else SOME_FAMILIES)


def formats(thorough: bool) -> dict[str, tuple[str, ...]]:
    """Return the types of GGUF files that are checked, each with the formats of its cache."""
    if not thorough:
        return SOME_FORMATS
    return {quant: tuple(FORMATS) if quant == "q8_0" else ("f16",) for quant in TYPES}


def main(folder: Path, thorough: bool) -> None:
    """Check some families and formats, or all."""
    find_faults()
    compare_keys()
    for name in families(thorough):
        write(build(name), folder / name)
    for quant in formats(thorough):
        write_tiny(folder / f"{quant}.gguf", quant=quant, width=256, heads=4, kv_heads=2, head_dim=64, ffn=256)
    for name in families(thorough):
        settings = json.loads((folder / name / "config.json").read_text())
        with FakeGpu() as gpu, open_safetensors(folder / name) as model:
            source = FolderSource(model, settings)
            check(name, gpu, load(read_config(settings), source, "cuda", torch.bfloat16, "triton", context=CONTEXT))
    for quant, modes in formats(thorough).items():
        with FakeGpu() as gpu, open_gguf(folder / f"{quant}.gguf") as gguf:
            config = read_config(gguf.metadata)
            decoder = load(config, GGUFSource(gguf), "cuda", torch.bfloat16, "triton", context=CONTEXT)
            planned = TorchMemory(model_facts(gguf), sequences=NUM_SEQUENCES).graph_bytes(CONTEXT)
            for kv in modes:
                used = check(quant, gpu, decoder, kv)
                assert used <= planned <= 2 * used, f"{quant}: graphs work in {used} bytes, planned are {planned}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), thorough="--all" in sys.argv)
