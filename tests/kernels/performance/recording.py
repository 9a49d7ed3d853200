"""The launches of project code, recorded with their arguments, and run only where that is asked for.

    with Recorded(gpu) as record: ...  # project code on CPU tensors

Owns the seam, which is the emulator's: Triton's own binder and compiler make each kernel for the GPU. What is not a
launch of Triton is counted as a node by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.performance.estimate import Prepared, prepare
from tests.kernels.performance.gpus import Gpu
from tests.kernels.performance.launch import Launch
from tests.kernels.ptx.launch import Emulated, bound_arguments

WITHOUT_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty"}


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel that was launched on a GPU, and can be launched again."""

    name: str
    run: Callable[..., object]
    args: tuple[Any, ...]
    options: dict[str, Any]


Node = str | Launch | Prepared | Call  # a kernel of torch by its name, a launch, or one that has run


def name_of(node: Node) -> str:
    """Return the name of a node's kernel; those of torch begin with "torch "."""
    if isinstance(node, str):
        return f"torch {node}"
    if isinstance(node, Call):
        return node.name
    launch = node.launch if isinstance(node, Prepared) else node
    return str(launch.compiled.metadata.name)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number of a tensor's memory, which also tensors without memory have."""
    return int(tensor.untyped_storage()._cdata)


class OwnKernels(TorchDispatchMode):
    """Notes torch's own kernels: calls whose result is neither new and empty nor a view of an argument."""

    def __init__(self, note: Callable[[str, Call], None]) -> None:
        super().__init__()
        self.note = note
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        if torch.is_tensor(result) and name not in WITHOUT_KERNEL and not self.paused:
            given = {storage_of(arg) for arg in args if torch.is_tensor(arg)}
            if name.endswith("_") or storage_of(result) not in given:
                self.note(name, Call(f"torch {name}", func, args, kwargs or {}))
        return result


class Recorded(Emulated):
    """Record launches, and run them as well while `runs` is set."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu.capability, num_sms=gpu.num_sms, assembles=True)
        self.nodes: list[Node] = []
        self.runs = False
        self._own = OwnKernels(lambda name, _: self.nodes.append(name))
        self._cold: set[int] = set()

    def __enter__(self) -> Self:
        super().__enter__()
        self._stack.enter_context(self._own)
        return self

    def keep_cold(self, tensors: list[torch.Tensor]) -> None:
        """Take tensors for too large, or too long ago, to be in the L2 cache."""
        self._cold |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _launch(self, kernel: Any, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any], grid: Any) -> None:
        bound = bound_arguments(kernel, args, options)
        signature = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
        shape = tuple(int(size) for size in (grid(bound) if callable(grid) else grid))
        arguments = {name: bound[name] for name in signature}
        warm = {
            name
            for name, value in arguments.items()
            if torch.is_tensor(value) and value.untyped_storage().data_ptr() not in self._cold
        }
        launch = Launch(compiled, (*shape, 1, 1)[:3], arguments, frozenset(warm))
        if self.runs:
            self._own.paused = True
            self.nodes.append(prepare(launch, whole=True))
            self._own.paused = False
        else:
            self.nodes.append(launch)
