"""Real failures of Triton on this machine: what the trial of a GPU would say of each, by name, as JSON."""

from __future__ import annotations

import json
import os
import sysconfig
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src

from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.trial import explained
from edgelm.base.errors import EngineError
from edgelm.kernels.trial.kernel import trial_kernel

HEADERS = "#include <Python.h>\nint x;"


def for_target(capability: int) -> None:
    types = {"x_ptr": "*fp16", "y_ptr": "*fp16", "out_ptr": "*fp32", "SIZE": "constexpr"}
    source = ASTSource(trial_kernel, types, {(3,): 16})  # type: ignore[no-untyped-call]
    triton_compile(source, target=GPUTarget("cuda", capability, 32))  # type: ignore[no-untyped-call]


def build(name: str, **environment: str) -> None:
    with patch.dict(os.environ, environment):
        compile_module_from_src(src=HEADERS, name=name)


def without_headers() -> None:
    real: Any = sysconfig.get_paths
    nowhere = {"include": "/nonexistent"}
    sysconfig.get_paths = lambda *args, **named: {**real(*args, **named), **nowhere}
    build("no_headers")


def without_programs() -> None:
    raise ImportError("cuda_utils.so: failed to map segment from shared object")


CASES: dict[str, Callable[[], None]] = {
    "sm_90": lambda: for_target(90),
    "sm_130": lambda: for_target(130),
    "no compiler": lambda: build("no_compiler", PATH="/nonexistent"),
    "no such compiler": lambda: build("no_such", CC="/nonexistent/cc"),
    "no headers": without_headers,
    "noexec": without_programs,
}


def message_of(case: Callable[[], None]) -> str:
    """Return the error of a case; empty if there is none."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
        try:
            with explained(), gpu_errors():
                case()
        except EngineError as problem:
            return str(problem)
    return ""


def main() -> None:
    for name, case in CASES.items():
        if (child := os.fork()) == 0:  # a process for each: Triton remembers the compiler that it found
            print(json.dumps({name: message_of(case)}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
