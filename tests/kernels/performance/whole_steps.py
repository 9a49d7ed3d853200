"""Whole steps on the GPU at hand: the project's executor with all layers and its CUDA graphs, over weights at random.

Owns how a step is timed: as the engine runs it, a step is launched before the results of the one before it are read.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.backends.torch.graphs import Graphs
from edgelm.core import Step
from edgelm.kernels.cache import BLOCK_LEN
from tests.backends.torch import shape_models
from tests.kernels.benchmark import tensors_of
from tests.kernels.performance.launched import fill
from tests.kernels.performance.step import LAYERS, Scene, step_of

STEPS = 50
ROUNDS = 5


def executor_key(scene: Scene) -> tuple[str, int]:
    """Return the cache and the context: scenes with equal ones can share an executor."""
    return scene.kv, scene.context


@contextmanager
def executor_for(scenes: Sequence[Scene], device: torch.device, num_layers: int = LAYERS) -> Iterator[TorchExecutor]:
    """Give an executor for steps that have the same cache, as a loaded model has it but for tuned configurations."""
    _free_memory()  # of the nodes before, which a cycle of references keeps
    first = scenes[0]
    assert {executor_key(scene) for scene in scenes} == {executor_key(first)}
    with patch.object(shape_models, "DEVICE", device):
        decoder = first.model(num_layers)
    for tensor in tensors_of(decoder.weights):
        fill(tensor)
    positions = max(scene.sequences * -(-(scene.depth + scene.rows) // BLOCK_LEN) * BLOCK_LEN for scene in scenes)
    options = TorchOptions(
        context=first.context,
        capacity=max(first.context, positions),
        kv=first.kv,
        max_sequences=max(scene.sequences for scene in scenes),
    )
    executor = TorchExecutor(decoder, options)
    try:
        yield executor
    finally:
        executor.close()
        del executor, decoder
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def step_ms(executor: TorchExecutor, scene: Scene) -> float:
    """Return the time of a step of a scene: the median of rounds. Raises RuntimeError if it is no CUDA graph."""
    step = step_of(scene)
    with patch.object(Graphs, "replay", side_effect=Graphs.replay, autospec=True) as replay:
        _round_ms(executor, step, 3)
    if replay.call_count != 3:
        raise RuntimeError(f"{scene.name} has no CUDA graph: the memory was too little for it")
    return statistics.median(_round_ms(executor, step, STEPS) for _ in range(ROUNDS))


def _round_ms(executor: TorchExecutor, step: Step, count: int) -> float:
    begun = time.perf_counter()
    unread = None
    for _ in range(count):
        executor.forward(step)
        samples = executor.sample(step, None)
        if unread is not None:
            unread.read()
        unread = samples
    assert unread is not None
    unread.read()
    return 1e3 * (time.perf_counter() - begun) / count
