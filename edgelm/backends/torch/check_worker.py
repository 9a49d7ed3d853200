"""The worker that checks the GPU's kernels: a crash or a hang of one ends it, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

import torch

from edgelm.backends.gpu_check import Begun, CheckGpu, Checked
from edgelm.backends.model import open_model
from edgelm.backends.torch.build import DTYPES
from edgelm.backends.torch.executor import device_name
from edgelm.backends.torch.self_check import check_model
from edgelm.backends.torch.trial import run_trial
from edgelm.kernels.choice import PLAIN_OPS
from edgelm.workers.child import Child, run_job


def check(
    request: CheckGpu,
    child: Child,
    device: torch.device | None = None,
    trial: Callable[[torch.device], None] = run_trial,
) -> None:
    """Run the small kernel, then the ops of the model. Raises EngineError, ModelError."""
    device = device or torch.device("cuda", 0)
    child.send(Begun("", ""))
    trial(device)
    PLAIN_OPS.update(request.plain)
    quantize: Literal["int4"] | None = "int4" if request.quantize == "int4" else None
    with open_model(request.model) as model:
        verdicts = check_model(
            model,
            device,
            DTYPES[device.type],
            request.modes,
            quantize=quantize,
            begins=lambda op, detail: child.send(Begun(op, detail)),
        )
    child.send(Checked(device_name(device), tuple(verdicts)))


if __name__ == "__main__":
    sys.exit(run_job({CheckGpu: check}))
