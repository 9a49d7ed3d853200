"""Whole models on a GPU, in one call: our executor, llama.cpp's CUDA build and transformers on the same shapes.

    python -m tests.bench.gpu_models --out FOLDER [--llama-bench PROGRAM] [--shapes llama-8b,...] [--quants Q4_K,...]
    python -m tests.bench.gpu_models --out FOLDER --tiny      # dry run on the CPU, by the reference ops

Writes models.jsonl, a row for each figure, and profile.txt. Models have random weights and are made here. `llama-bench`
is a program of llama.cpp, built with -DGGML_CUDA=ON from the sources in llama-cpp-python's sdist:
cmake -B build -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90 && cmake --build build --target llama-bench
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Quant

from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.checkpoints.gguf import open_gguf
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Stats, Step
from edgelm.engine.engine import Engine
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.scheduler import Scheduler
from edgelm.kernels.cache import BLOCK_LEN
from edgelm.kernels.gpu_target import target_of
from edgelm.models.config import read_config
from edgelm.models.loading.decoder import load
from edgelm.models.loading.sources import GGUFSource
from tests.bench.random_models import SHAPES, Shape, write_model

CONTEXT = 16_384
BATCHES = 1, 4, 16
VERIFY_ROWS = 1, 4, 8, 16
PROMPTS = 512, 2_048, 8_192
REPEATS = 50
ENGINE_TOKENS = 256
BITS = {"Q4_0": 4.5, "Q4_K": 4.625, "Q8_0": 8.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `fraction` is of the read bandwidth that was measured in the same run."""

    engine: str
    model: str
    quant: str
    test: str
    milliseconds: float
    tokens_per_second: float
    fraction: float | None = None


class Report:
    """Writes rows as they come, so that what was measured stays if the time ends."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "models.jsonl").open("w")
        self._write(header)

    def add(self, row: Row) -> None:
        self._write(asdict(row))

    def _write(self, document: dict[str, Any]) -> None:
        line = json.dumps(document)
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()


class Bench:
    """Steps on one executor that nothing else uses."""

    def __init__(self, executor: TorchExecutor, repeats: int) -> None:
        self._executor = executor
        self._repeats = repeats
        self._seqs = [Sequence(i, [0], 1, SamplingParams(temperature=0)) for i in range(16)]

    def decode_ms(self, batch: int, rows: int = 1, depth: int = 128) -> float:
        """Return the time of a step in which `batch` sequences at a depth have `rows` rows each."""
        blocks = -(-(depth + rows) // BLOCK_LEN)
        chunks = tuple(
            Chunk(self._seqs[i], depth, [5] * rows, rows, tuple(range(i * blocks, (i + 1) * blocks)))
            for i in range(batch)
        )
        return self._time(Step(chunks))

    def prefill_ms(self, length: int) -> float:
        """Return the time of a prompt, in the steps that the executor takes."""
        table = tuple(range(-(-length // BLOCK_LEN)))
        most = self._executor.info.max_tokens
        begun = time.perf_counter()
        for start in range(0, length, most):
            count = min(most, length - start)
            rows = int(start + count == length)
            step = Step((Chunk(self._seqs[0], start, [5] * count, rows, table),))
            self._executor.forward(step)
        self._executor.sample(step, None).read()
        return 1e3 * (time.perf_counter() - begun)

    def _time(self, step: Step) -> float:
        times = []
        for _ in range(self._repeats + 3):
            begun = time.perf_counter()
            self._executor.forward(step)
            self._executor.sample(step, None).read()
            times.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(times[3:])


def engine_ms(executor: TorchExecutor, batch: int, tokens: int) -> float:
    """Return the time of a step as requests see it: with scheduler, sampling and delivery, without drafts."""
    clock = StepClock()
    scheduler = Scheduler(executor.info, PagedKV(executor.info, executor.info.block_len), clock)
    engine = Engine(executor, scheduler, clock).start()

    async def ask(first: int) -> Stats:
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=tokens)
        stats = [event.stats async for event in engine.submit([first + 5] * 32, params)][-1]
        assert stats is not None
        return stats

    async def together() -> list[Stats]:
        return list(await asyncio.gather(*map(ask, range(batch))))

    try:
        asyncio.run(together())  # kernels are compiled here
        stats = asyncio.run(together())
    finally:
        engine.stop()
    assert all(each.completion_tokens == tokens for each in stats)
    return statistics.median(each.decode_ms / (tokens - 1) for each in stats)


@contextmanager
def loaded(
    path: Path, device: str, kv: str, *, graphs: bool, context: int, ahead: bool = True
) -> Iterator[tuple[TorchExecutor, float]]:
    """Give an executor over a file, and the seconds that loading took."""
    begun = time.perf_counter()
    dtype, implementation = (torch.bfloat16, "triton") if device == "cuda" else (torch.float32, "reference")
    with open_gguf(path) as gguf:
        decoder = load(read_config(gguf.metadata), GGUFSource(gguf), device, dtype, implementation, context=context)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    room = max(context, 16 * 2 * BLOCK_LEN * 8)
    options = TorchOptions(
        context=context, capacity=room, kv=kv, max_sequences=16, max_tokens=min(2048, context), graphs=graphs,
        runs_ahead=ahead,
    )  # fmt: skip
    executor = TorchExecutor(decoder, options)
    try:
        yield executor, seconds
    finally:
        executor.close()
        del decoder


def measure_ours(
    report: Report, name: str, shape: Shape, quant: str, path: Path, device: str, gbps: float | None, *, tiny: bool
) -> None:
    """Measure decoding with and without graphs, verification, prefill and loading."""
    context = 512 if tiny else CONTEXT
    read = shape.weights * BITS[quant] / 8

    def row(test: str, ms: float, tokens: int, *, reads: bool = True) -> None:
        fraction = read / (ms * 1e-3) / (gbps * 1e9) if gbps and reads else None
        report.add(
            Row(
                engine="edgelm", model=name, quant=quant, test=test, milliseconds=ms,
                tokens_per_second=1e3 * tokens / ms, fraction=fraction,
            )
        )  # fmt: skip

    for graphs in (True, False):
        with loaded(path, device, "f16", graphs=graphs, context=context) as (executor, seconds):
            bench = Bench(executor, 3 if tiny else REPEATS)
            kind = "graphs" if graphs else "no graphs"
            for batch in BATCHES:
                row(f"decode batch {batch}, {kind}", bench.decode_ms(batch), batch)
            if not graphs:
                continue
            report.add(
                Row(engine="edgelm", model=name, quant=quant, test="load", milliseconds=1e3 * seconds,
                    tokens_per_second=0.0)
            )  # fmt: skip
            for rows in VERIFY_ROWS:
                row(f"verify {rows} rows", bench.decode_ms(1, rows), rows)
            for depth in (1024, 8192):
                if depth + 16 < context:
                    row(f"decode at depth {depth}", bench.decode_ms(1, depth=depth), 1)
            for length in PROMPTS:
                if length < context:
                    bench.prefill_ms(length)
                    row(f"prefill {length}", bench.prefill_ms(length), length, reads=False)
    for ahead in (True, False):
        with loaded(path, device, "f16", graphs=True, context=context, ahead=ahead) as (executor, _):
            for batch in BATCHES:
                ms = engine_ms(executor, batch, 8 if tiny else ENGINE_TOKENS)
                row(f"engine batch {batch}, graphs{', one step ahead' if ahead else ''}", ms, batch)


def measure_llama(report: Report, name: str, quant: str, path: Path, program: Path) -> None:
    """Run llama.cpp's own benchmark on the same file, with flash attention."""
    done = subprocess.run(
        [program, "-m", path, "-ngl", "99", "-fa", "1", "-p", "512,2048,8192", "-n", "128", "-r", "3", "-o", "json"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        print(f"llama-bench failed: {done.stderr.strip().splitlines()[-1:]}")
        return
    for each in json.loads(done.stdout):
        tokens = each["n_prompt"] or each["n_gen"]
        test = f"prefill {tokens}" if each["n_prompt"] else "decode batch 1"
        speed = each["avg_ts"]
        report.add(
            Row(engine="llama.cpp", model=name, quant=quant, test=test, milliseconds=1e3 / speed,
                tokens_per_second=speed)
        )  # fmt: skip


def measure_transformers(report: Report, name: str, shape: Shape, device: str, *, tiny: bool) -> None:
    """Decode with transformers in bfloat16, compiled, over a static cache."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=2048,
    )  # fmt: skip
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=256)
    forward = model.forward if tiny else torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ids, times = torch.tensor([[5]], device=device), []
    with torch.inference_mode():
        for position in range(8 if tiny else 64):
            begun = time.perf_counter()
            place = torch.tensor([position], device=device)
            logits = forward(ids, past_key_values=cache, cache_position=place, use_cache=True).logits
            logits.argmax(-1).cpu()
            times.append(1e3 * (time.perf_counter() - begun))
    ms = statistics.median(times[len(times) // 2 :])
    test = "decode batch 1" if tiny else "decode batch 1, torch.compile"
    report.add(
        Row(engine="transformers", model=name, quant="BF16", test=test, milliseconds=ms, tokens_per_second=1e3 / ms)
    )


def write_profile(path: Path, device: str, out: Path, *, tiny: bool) -> None:
    """Write where the time of decode steps goes, kernel by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with loaded(path, device, "f16", graphs=not tiny, context=512) as (executor, _):
        bench = Bench(executor, 5)
        with torch.profiler.profile(activities=activities) as profile:
            bench.decode_ms(1)
        key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
        out.write_text(profile.key_averages().table(sort_by=key, row_limit=40))


def attempt(what: str, work: Callable[[], None]) -> None:
    """Do one part; what fails is told and does not end the others, whose time was paid for."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - as the docstring says
        print(f"{what} failed: {type(error).__name__}: {error}", flush=True)


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path("/tmp/edgelm-bench"))
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--shapes", default="llama-8b,llama-1b")
    parser.add_argument("--quants", default="Q4_K,Q4_0")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    gbps = None
    if device == "cuda":
        from tests.kernels.benchmark.timing import read_gbps

        gbps = read_gbps(torch.device(device))
    target = target_of(torch.device(device, 0) if device == "cuda" else torch.device(device))
    report = Report(options.out, {"target": target._asdict(), "read_gbps": gbps})
    options.models.mkdir(parents=True, exist_ok=True)
    for name in ["tiny"] if options.tiny else options.shapes.split(","):
        shape = SHAPES[name]
        for quant in options.quants.split(","):
            path = options.models / f"{name}-{quant}.gguf"
            if not path.exists():
                write_model(path, shape, Quant[quant])
            attempt("edgelm", partial(measure_ours, report, name, shape, quant, path, device, gbps, tiny=options.tiny))
            if options.llama_bench:
                attempt("llama.cpp", partial(measure_llama, report, name, quant, path, options.llama_bench))
            profile = options.out / f"profile-{name}-{quant}.txt"
            attempt("profile", partial(write_profile, path, device, profile, tiny=options.tiny))
        attempt("transformers", partial(measure_transformers, report, name, shape, device, tiny=options.tiny))


if __name__ == "__main__":
    main()
