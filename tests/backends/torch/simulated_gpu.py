"""The worker of the GPU check on a simulated GPU: CPU tensors, and kernels in Triton's interpreter.

    python -m tests.backends.torch.simulated_gpu [no-compiler | wrong:OP | crash:OP | hang:OP]

For tests, and for the transcripts in docs/results. What a missing compiler raises is raised by Triton itself.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import tempfile
import time
from functools import partial
from typing import Any

import torch

from edgelm.backends.gpu_check import CheckGpu
from edgelm.backends.torch import check_worker, self_check
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.trial import explained, run_trial
from edgelm.base.workers.child import run_job
from edgelm.kernels import choice
from tests.interpreter import quicken_interpreter

NAME = "Simulated GPU"


def without_compiler(_: torch.device) -> None:
    """Let Triton look for a compiler that is not there."""
    from triton.runtime.build import compile_module_from_src

    os.environ["PATH"] = "/nonexistent"
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="edgelm-no-compiler-")
    with explained(), gpu_errors():
        compile_module_from_src(src="int x;", name="trial")


def spoil(what: str, op: str) -> None:
    """Let the kernel of an op give wrong numbers, end the process, or never end."""
    real = choice.choose

    def choose(name: str, implementations: Any, *rest: Any) -> Any:
        if name == op and name not in choice.PLAIN_OPS:
            kernel = implementations[0]
            implementations = (kernel._replace(run=partial(broken, kernel.run)), *implementations[1:])
        return real(name, implementations, *rest)

    def broken(run: Any, *args: Any, **named: Any) -> Any:
        if what == "crash":
            os.abort()
        if what == "hang":
            time.sleep(3600)
        result = run(*args, **named)
        for target in args[-1:] if result is None else result if isinstance(result, tuple) else (result,):
            target.mul_(1.5)
        return result

    for module in [module for name, module in sys.modules.items() if name.startswith("edgelm.kernels")]:
        if getattr(module, "choose", None) is real:
            module.choose = choose  # type: ignore[attr-defined]


def main() -> int:
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    what, _, op = fault.partition(":")
    if op:
        spoil(what, op)
    quicken_interpreter()
    # the interpreter takes a second for a few rows
    self_check.PROMPTS, self_check.LONG_PROMPT, self_check.VERIFIED = (5, 3), 0, 2
    check_worker.device_name = lambda _: NAME  # type: ignore[assignment]
    trial = without_compiler if fault == "no-compiler" else run_trial
    check = partial(check_worker.check, device=torch.device("cpu"), trial=trial)
    return run_job({CheckGpu: check})


if __name__ == "__main__":
    sys.exit(main())
