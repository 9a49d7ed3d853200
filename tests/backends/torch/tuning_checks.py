"""Tune a model at load on a fake GPU with simulated times: `python -m tests.backends.torch.tuning_checks FOLDER`.

test_load_tuning.py runs this as a child process, where kernels are not interpreted. Each situation is a start of its
own, and prints a line of JSON. All times are simulated: a launch costs what the situation says.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from edgelm.backends.reports import Reports
from edgelm.backends.torch import load_tuning
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.base.errors import EdgeLMError
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from edgelm.kernels.tuning import TABLE
from tests.backends.torch.fake_gpu import FakeGpu
from tests.backends.torch.shape_models import decoder, dense

CONTEXT = 256
US = 10.0  # of a launch of the default
Options = dict[str, Any]


def is_faster(options: Options) -> bool:
    """Return whether a launch is one without prefetching, which no default is."""
    return options.get("PF") == 0


def relative(factor: float, with_many_rows: float = 0.0) -> Callable[[str, Options], float]:
    """Return the times of launches: those without prefetching take `factor` of a default's, or another with 64 rows."""

    def launch_us(name: str, options: Options) -> float:
        if name != "decode_kernel":
            return 0.0
        return US * ((with_many_rows or factor) if options["TT"] > 1 else factor) if is_faster(options) else US

    return launch_us


@dataclass
class Situation:
    """A start, described by its differences from a usual one on an empty folder."""

    launch_us: Callable[[str, Options], float] = field(default_factory=lambda: relative(0.8))
    right: Callable[[], bool] = lambda: True  # whether a result agrees
    fits: Callable[[Options], bool] = lambda _: True
    limit_s: float = 1e9  # of simulated time
    new_process: bool = True
    tune: bool = True
    graphs: bool = True
    goes_on: Callable[[], bool] = lambda: True
    before: Callable[[Path], None] = lambda _: None
    failing: Callable[[], Any] | None = None  # what a measurement does instead


@dataclass
class Start:
    """The record of a start."""

    lines: list[str] = field(default_factory=list)
    launches: list[Options] = field(default_factory=list)  # of matmuls, after tuning
    timed: int = 0


def some_configs(launches: list[Options]) -> dict[str, set[tuple[int, int, int]]]:
    """Return the warps, parts of K and prefetching of each matrix."""
    configs: dict[str, set[tuple[int, int, int]]] = {}
    for one in launches:
        shape = f"{one['N']}x{one['K']} {one['BITS']}{' gated' if one['GATE'] else ''}"
        configs.setdefault(shape, set()).add((one["NW"], one["SPLITS"], one["PF"]))
    return configs


@contextmanager
def simulated(gpu: FakeGpu, situation: Situation, start: Start) -> Iterator[None]:
    """Let launches cost what the situation says, and results be what it says."""
    launch, timer, tuned = JITFunction.run, load_tuning.time_us, TorchExecutor._tune

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        if kernel.__name__ == "decode_kernel" and not options.get("warmup"):
            if not situation.fits(options):
                raise OutOfResources(300_000, 232_448, "shared memory")
            start.launches.append(options)
        return launch(kernel, *args, **options)

    def time_us(*args: Any) -> float:
        start.timed += 1
        return situation.failing() if situation.failing else timer(*args)

    def tune(executor: TorchExecutor, reports: Reports) -> None:
        before = gpu.live_bytes
        tuned(executor, reports)
        assert gpu.live_bytes <= before, f"tuning keeps {gpu.live_bytes - before} bytes"
        start.launches.clear()
        gpu.peak_bytes = gpu.live_bytes  # what follows must not profit from it

    gpu.launch_us = situation.launch_us
    patches = [
        patch.object(JITFunction, "run", run),
        patch.object(load_tuning, "time_us", time_us),
        patch.object(load_tuning, "bounds_of", lambda *_: None),  # a fake GPU has no numbers
        patch.object(load_tuning, "agrees", lambda *_: situation.right()),
        patch.object(load_tuning, "LIMIT_S", situation.limit_s),
        patch.object(load_tuning, "time", SimpleNamespace(monotonic=lambda: gpu.clock_us / 1e6)),
        patch.object(TorchExecutor, "_tune", tune),
    ]
    with ExitStack() as stack:
        for replacement in patches:
            stack.enter_context(replacement)
        yield


def load(folder: Path, situation: Situation) -> dict[str, Any]:
    """Load a model as a new process does, or as the second one of a process; return what happened."""
    if situation.new_process:
        TABLE.close()
    situation.before(folder)
    start = Start()
    result: dict[str, Any] = {"error": ""}
    with FakeGpu() as gpu, torch.inference_mode(), simulated(gpu, situation, start):
        model = decoder(
            hidden_size=1024, num_heads=8, num_kv_heads=2, head_dim=128, vocab=4096, kind="Q4_K",
            feeds=[dense("Q4_K", "Q6_K", 2048)],
        )  # fmt: skip
        options = TorchOptions(
            context=CONTEXT, capacity=2 * CONTEXT, max_sequences=2, max_tokens=CONTEXT, graphs=situation.graphs,
            tuned=folder if situation.tune else None,
        )  # fmt: skip
        reports = Reports(lambda _: situation.goes_on(), start.lines.append)
        try:
            executor = TorchExecutor(model, options, reports=reports)
        except EdgeLMError as error:
            result["error"] = f"{type(error).__name__}: {error.message}"
        else:
            num_compiled, peak = len(gpu.compiled), gpu.peak_bytes
            run_steps(executor)
            result |= {"compiled later": len(gpu.compiled) - num_compiled, "more bytes later": gpu.peak_bytes - peak}
            executor.close()
        compiled = set(gpu.compiled)
        result |= {"alone": len(compiled - gpu.ahead), "unused": len(gpu.ahead - compiled)}
    configs = some_configs(start.launches)
    files = list(folder.iterdir()) if folder.is_dir() else []
    return result | {
        "timed": start.timed,
        "lines": [line for line in start.lines if line.startswith("tuning")],
        "matrices": len(configs),
        "of one config": sum(len({config[:2] for config in some}) == 1 for some in configs.values()),
        "faster": sum(all(not config[2] for config in some) for some in configs.values()),
        "kept": json.loads(files[0].read_text()) if files else {},
        "files": len(files),
    }


def run_steps(executor: TorchExecutor) -> None:
    """Decode, verify, and run a short prompt, all of which run the same matmul."""
    seq = Sequence(0, [5], 1, SamplingParams())
    for tokens in (1, 5, 16, 40):
        step = Step((Chunk(seq, 0, [5] * tokens, tokens, (0, 1)),))
        executor.forward(step)
        executor.sample(step, None).read()


def measuring_default() -> bool:
    return all(config._asdict()["prefetch"] for config in TABLE.in_use.values())


def damage(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_text('{"matmul": {"q4_k 10')


def out_of_memory() -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")


def broken() -> Any:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def cancels() -> Callable[[], bool]:
    calls = itertools.count()
    return lambda: next(calls) < 30


SITUATIONS: dict[str, tuple[str, Callable[[], Situation]]] = {  # name -> folder, situation
    "first": ("a", Situation),
    "second": ("a", Situation),
    "damaged": ("a", lambda: Situation(before=damage)),
    "not tuned": ("b", lambda: Situation(tune=False)),
    "no graphs": ("c", lambda: Situation(graphs=False)),
    "wrong": ("d", lambda: Situation(right=measuring_default)),
    "does not fit": ("e", lambda: Situation(fits=lambda options: not is_faster(options))),
    "equal": ("f", lambda: Situation(relative(0.99))),
    "slow with many rows": ("g", lambda: Situation(relative(0.8, with_many_rows=1.1))),
    "limit": ("h", lambda: Situation(limit_s=0.25)),
    "a second model after the limit": ("h", lambda: Situation(new_process=False)),
    "after the limit": ("h", Situation),
    "cancelled": ("i", lambda: Situation(goes_on=cancels())),
    "after cancelling": ("i", Situation),
    "out of memory": ("j", lambda: Situation(failing=out_of_memory)),
    "broken": ("k", lambda: Situation(failing=broken)),
    "broken again": ("k", lambda: Situation(failing=broken)),
    "not tried again": ("k", Situation),
}


def main(folder: Path) -> None:
    for name, (place, situation) in SITUATIONS.items():
        print(json.dumps({"situation": name, **load(folder / place, situation())}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
