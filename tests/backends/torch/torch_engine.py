"""Engines over the torch executor for tests, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.checkpoints.gguf import open_gguf
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Drafter
from edgelm.engine.engine import Engine
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.scheduler import Scheduler
from edgelm.kernels.cache import BLOCK_LEN
from edgelm.models.config import read_config
from edgelm.models.decoder import Decoder
from edgelm.models.loading.decoder import load
from edgelm.models.loading.sources import GGUFSource


def load_gguf(path: Path, implementation: str = "reference", dtype: torch.dtype = torch.float32) -> Decoder:
    with open_gguf(path) as gguf:
        return load(read_config(gguf.metadata), GGUFSource(gguf), "cpu", dtype, implementation)


def make_executor(
    decoder: Decoder,
    context: int = 256,
    capacity: int = 0,
    kind: type[TorchExecutor] = TorchExecutor,
    **options: object,
) -> TorchExecutor:
    room = -(-max(capacity, context) // BLOCK_LEN) * BLOCK_LEN
    return kind(decoder, TorchOptions(**{"context": context, "capacity": room} | options))  # type: ignore[arg-type]


@contextmanager
def running(decoder: Decoder, *, drafter: Drafter | None = None, **options: object) -> Iterator[Engine]:
    executor = make_executor(decoder, **{"recomputes": True} | options)  # type: ignore[arg-type]
    clock = StepClock()
    scheduler = Scheduler(executor.info, PagedKV(executor.info, executor.info.block_len), clock, drafter)
    engine = Engine(executor, scheduler, clock).start()
    try:
        yield engine
    finally:
        engine.close()
