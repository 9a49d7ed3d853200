"""The compilations of kernels that a start needs: found without a GPU, and done without one.

    python -m tests.backends.torch.compilations [MODEL] [KERNEL ..]

compiles the kernels of a model of shape_models.py for sm_90, all or those of some names, as a start does on a GPU, and
prints how many were in Triton's cache on disk. test_warm_up.py runs it twice. Knows nothing of models and processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source
from triton.runtime.jit import JITFunction

from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from tests.backends.torch.fake_gpu import FakeGpu
from tests.backends.torch.shape_models import MODELS


@dataclass(frozen=True, slots=True)
class Compilation:
    """One kernel for one kind of arguments. It can be pickled."""

    module: str
    name: str
    signature: dict[str, str]  # the type of each argument
    constants: dict[tuple[int, ...], object]  # values of constexprs, by position
    attributes: dict[tuple[int, ...], Any]  # what is known of arguments, such as their alignment
    options: dict[str, Any]
    target: tuple[str, int, int]  # backend, compute capability, threads of a warp
    key: str = field(compare=False, default="")  # by which Triton finds the kernel in this process

    def run(self) -> None:
        """Compile it into the cache on disk, where it may already be. Raises the errors of Triton's compiler."""
        compile_source(self._source, target=GPUTarget(*self.target), options=self.options)

    @property
    def _source(self) -> ASTSource:
        kernel = getattr(import_module(self.module), self.name)
        return ASTSource(kernel, self.signature, self.constants, self.attributes)


@contextmanager
def recording() -> Iterator[list[Compilation]]:
    """Look up the kernels that the block launches, but launch none; yield those that this process does not have.

    All other work of the block is done, with numbers that no kernel wrote.
    """
    missing: dict[tuple[str, str], Compilation] = {}
    found: list[Compilation] = []
    look_up, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = True, **options: Any) -> Any:
        return look_up(kernel, *args, grid=grid, warmup=True, **options)

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002 - Triton's name
        kernel = fn.jit_function
        if (kernel.__name__, key) not in missing:
            compilation = missing[kernel.__name__, key] = _compilation(kernel, key, compile)
            found.append(compilation)
        return True  # not to be compiled now

    JITFunction.run, knobs.runtime.jit_cache_hook = run, note
    try:
        yield found
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = look_up, hook


def _compilation(kernel: Any, key: str, compile: dict[str, Any]) -> Compilation:  # noqa: A002
    stored = json.loads(compile["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    (attributes,) = compile["configs"]
    target = kernel.device_caches[compile["device"]][2]
    return Compilation(
        module=kernel.__module__,
        name=kernel.__name__,
        signature=dict(compile["signature"]),
        constants=dict(compile["constants"]),
        attributes=dict(attributes),
        options=options,
        target=(target.backend, target.arch, target.warp_size),
        key=key,
    )


def main(model: str, kernels: list[str]) -> None:
    """Compile the kernels of a model, and print what was found in the cache."""
    hits: list[bool] = []

    def count(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    with FakeGpu(), torch.inference_mode(), recording() as found:
        TorchExecutor(MODELS[model](), TorchOptions(context=8192, capacity=65536, max_tokens=1024)).close()
    some = [compilation for compilation in found if not kernels or compilation.name in kernels]
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    with patch.object(knobs.compilation, "listener", count):
        for compilation in some:
            compilation.run()
    result = {
        "model": model, "kernels": len(found), "compiled": hits.count(False), "in_cache": hits.count(True),
        "seconds": round(time.perf_counter() - start, 1), "cpu_seconds": round(sum(os.times()[:4]) - cpu_start, 1),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
