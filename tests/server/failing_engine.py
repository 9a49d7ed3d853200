"""An engine process whose GPU fails as a test says: the torch engine on the processor in place of a GPU.

    python -m tests.server.failing_engine   # instead of `edgelm.server.engine_process.worker`

PLAN beside the model has one line of JSON for each start with "CUDA": `{"load": MESSAGE}` fails the loading, `{"step":
MESSAGE, "after": N}` the N-th step and later ones (`"until": M`: only those before the M-th), `{"hang": N}` makes the
N-th step hang, `{"load_hangs": true}` the loading, and `{}` fails nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import edgelm.backends.build as build
import edgelm.backends.torch.build as torch_build
from edgelm.backends.torch.executor import TorchExecutor
from edgelm.base.machine.gpu import CudaState
from edgelm.base.workers.child import Child, run_job
from edgelm.base.workers.messages import ServeJob
from edgelm.engine import engine, watchdog
from edgelm.jobs.worker import work_with_engine
from edgelm.server.engine_process.worker import _serve

PLAN = "gpu-plan.jsonl"
GPU = CudaState("", "", "GPU X", 80 * 2**30, 80 * 2**30)


def next_failure(folder: Path) -> dict[str, Any]:
    """Take the first line of the plan."""
    lines = (folder / PLAN).read_text().splitlines()
    (folder / PLAN).write_text("\n".join(lines[1:]))
    return json.loads(lines[0]) if lines else {}


def fail(executor: type[TorchExecutor], failure: dict[str, Any]) -> None:
    """Let one step of the executors fail, or hang."""
    forward, num_steps = executor._run, 0

    def run(self: TorchExecutor, tensors: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == failure.get("hang"):
            time.sleep(1000)
        if "step" in failure and failure["after"] <= num_steps < failure.get("until", num_steps + 1):
            raise torch.AcceleratorError(failure["step"])
        return forward(self, tensors)

    executor._run = run


def serve(job: ServeJob, child: Child) -> None:
    real = torch_build.build_torch

    def build_torch(*args: Any, **options: Any) -> Any:
        failure = next_failure(job.model.parent)
        if "load" in failure:
            with torch_build.gpu_errors():
                raise torch.AcceleratorError(failure["load"])
        if "load_hangs" in failure:
            watchdog.GPU_OTHER_S = 1.0
            time.sleep(1000)
        fail(TorchExecutor, failure)
        loaded = real(*args, **options | {"device": "cpu"})
        watchdog.GPU_OTHER_S = 1.0
        return loaded

    torch_build.build_torch = build_torch
    build.find_cuda = lambda: GPU
    watchdog.GPU_S = 1.0
    engine.Watchdog = partial(_on_gpu, tick_s=0.1)
    work_with_engine(_serve, job, child)


def _on_gpu(*args: Any, **options: Any) -> watchdog.Watchdog:
    dog = watchdog.Watchdog(*args, **options)
    dog._on_gpu = dog._on_gpu or args[0].engine == "torch"
    return dog


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(run_job({ServeJob: serve}))
