"""A worker of `edgelm eval` whose GPU hangs: in a step of the model "step", and in loading the model "load".

The torch engine on the processor is in place of a GPU, and a watchdog waits for a second instead of a minute.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import edgelm.backends.build as build
import edgelm.backends.torch.evaluation as torch_evaluation
from edgelm.backends.torch.executor import TorchExecutor
from edgelm.base.machine.gpu import CudaState
from edgelm.base.workers.child import Child, run_job
from edgelm.base.workers.messages import EvalJob
from edgelm.engine import watchdog
from edgelm.evaluation import watched
from edgelm.jobs.evaluate import evaluate_file

GPU = CudaState("", "", "GPU X", 80 * 2**30, 80 * 2**30)


def hang(*_: Any, **__: Any) -> None:
    time.sleep(1000)


def evaluate(job: EvalJob, child: Child) -> None:
    real = torch_evaluation.load_torch_evaluation
    if job.model.stem == "step":
        TorchExecutor._run = hang
        watchdog.GPU_S, watchdog.GPU_TOKEN_S = 1.0, 0.0
    if job.model.stem == "load":
        torch_evaluation.load_decoder = hang
        watchdog.GPU_OTHER_S = 1.0
    build.find_cuda = lambda: GPU
    torch_evaluation.load_torch_evaluation = lambda *args, **options: real(*args, **options | {"device": "cpu"})
    watched.Watchdog = _on_gpu
    build.Watchdog = partial(watchdog.Watchdog, tick_s=0.1)
    evaluate_file(job, child)


def _on_gpu(*args: Any) -> watchdog.Watchdog:
    dog = watchdog.Watchdog(*args, tick_s=0.1)
    dog._on_gpu = dog._on_gpu or args[0].engine == "torch"
    return dog


if __name__ == "__main__":
    sys.exit(run_job({EvalJob: evaluate}))
