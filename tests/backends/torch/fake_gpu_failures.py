"""Let a fake GPU run out of memory at each stage of loading: `python -m tests.backends.torch.fake_gpu_failures FOLDER`.

test_fake_gpu_failures.py runs this as a child process, where kernels are not interpreted. Prints a line of JSON for
each stage: what the executor, or the error, was.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from edgelm.backends.model import open_model
from edgelm.backends.plan import Option
from edgelm.backends.torch import build
from edgelm.backends.torch.executor import TorchExecutor
from edgelm.backends.torch.graphs import Graphs
from edgelm.backends.torch.memory import SMALL_STEP
from edgelm.backends.torch.sampler import DeviceSampler
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.engine.core import Chunk, SamplingParams, Sequence, Step
from edgelm.kernels import cache as kv_cache
from edgelm.models.decoder import Decoder
from tests.backends.torch.fake_gpu import FakeGpu
from tests.tiny import write_tiny

SETTINGS = Settings(parallel=2)
CONTEXT = 2048
ENDED_BADLY = "CUDA error: operation failed due to a previous error during capture"


def run_out(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB")


def run_out_and_end_badly(*_: Any, **__: Any) -> Any:
    try:
        run_out()
    finally:
        raise torch.AcceleratorError(ENDED_BADLY)


def above(context: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs out of memory where an executor's context is longer."""

    def limited(self: TorchExecutor, *args: Any) -> Any:
        if self.info.context > context:
            run_out()
        return real(self, *args)

    return limited


@contextmanager
def nth_graph(number: int, fail: Callable[[], Any] = run_out) -> Iterator[None]:
    """Fail at the begin of the n-th capture."""
    capture, numbers = torch.cuda.graph, itertools.count(1)

    def counted(*args: Any, **options: Any) -> Any:
        return fail() if next(numbers) == number else capture(*args, **options)

    with patch.object(torch.cuda, "graph", counted):
        yield


@contextmanager
def graphs_of_more_than(most: int) -> Iterator[None]:
    """Let the capture of larger graphs run out of memory; whenever the cache is emptied, no graph may be alive."""
    real, begun = TorchExecutor._run, Graphs.__init__
    tried: list[weakref.ref[Graphs]] = []

    def noted(self: Graphs, *args: Any) -> None:
        tried.append(weakref.ref(self))
        begun(self, *args)

    def limited(self: TorchExecutor, tensors: Any, *args: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and len(tensors.ids) > most:
            run_out()
        return real(self, tensors, *args)

    def emptied() -> None:
        assert all(graphs() is None for graphs in tried), "graphs of a failed capture are alive"

    gc.disable()
    with (
        patch.object(TorchExecutor, "_run", limited),
        patch.object(Graphs, "__init__", noted),
        patch.object(torch.cuda, "empty_cache", emptied),
    ):
        yield
    gc.enable()


def make(decoder: Decoder) -> dict[str, Any]:
    """Make an executor and run a step with it; return what became of it."""
    executor = build._executor(decoder, SETTINGS, Option("f16", CONTEXT, 0, 0, 0, fits=True), "m", SMALL_STEP)
    seq = Sequence(0, [5], 1, SamplingParams())
    step = Step((Chunk(seq, 0, [5], 1, (0,)),))
    executor.forward(step)
    executor.sample(step, None).read()
    sampler = executor._device_sampler
    assert sampler is not None
    made = {
        "context": executor.info.context,
        "graphs": executor._graphs.sizes[0] if executor._graphs else 0,
        "sampled": max((len(captured.logits) for captured in sampler._captured), default=0),
    }
    executor.close()
    return made


def main(folder: Path) -> None:
    path = write_tiny(
        folder / "m.gguf", quant="q8_0", width=256, heads=4, kv_heads=2, head_dim=64, ffn=256, context=CONTEXT
    )
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("edgelm").addHandler(handler)
    with FakeGpu(), open_model(path) as model:
        decoder = build.load_decoder(model, SETTINGS, "cuda", CONTEXT)
        stages: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
            "none": (patch.object(build, "log", build.log), lambda: make(decoder)),
            "weights": (
                patch.object(build, "load", run_out),
                lambda: {"context": build.load_decoder(model, SETTINGS, "cuda", CONTEXT)},
            ),
            "cache": (
                patch.object(TorchExecutor, "_allocate", above(600, TorchExecutor._allocate)),
                lambda: make(decoder),
            ),
            "every cache": (patch.object(kv_cache, "allocate", run_out), lambda: make(decoder)),
            "one graph": (nth_graph(4), lambda: make(decoder)),
            "large graphs": (graphs_of_more_than(8), lambda: make(decoder)),
            "graphs of more than a token": (graphs_of_more_than(1), lambda: make(decoder)),
            "every graph": (graphs_of_more_than(0), lambda: make(decoder)),
            "the sampler's graphs": (patch.object(DeviceSampler, "capture", run_out), lambda: make(decoder)),
            "capture ends badly": (nth_graph(2, run_out_and_end_badly), lambda: make(decoder)),
            "warm-up": (
                patch.object(TorchExecutor, "_warm_up", above(600, TorchExecutor._warm_up)),
                lambda: make(decoder),
            ),
        }
        for name, (failing, work) in stages.items():
            lines.clear()
            try:
                with failing:
                    result = work()
            except EdgeLMError as error:
                result = {"error": str(error), "kind": type(error).__name__}
            print(json.dumps({"stage": name, **result, "log": lines}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
