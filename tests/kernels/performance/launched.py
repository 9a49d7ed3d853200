"""The kernels of a step as they are launched on the GPU at hand, and the time of each.

    with Launched() as record: ...  # project code on the GPU

Owns what a node's time is: that very launch many times in a CUDA graph, over copies of its weights and cache that the
L2 cache cannot hold, with all other arguments where they are. Knows nothing of what is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from edgelm.backends.torch.timing import COLD_FACTOR, time_us
from tests.kernels.performance.recording import Call, Node, OwnKernels, storage_of

MAX_COPIES = 256
ROOM = 0.5  # of the free memory, for copies
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Clock = Callable[[Callable[[Arguments], object], Sequence[Arguments]], float]  # us of a call


class Launched:
    """Note the launches of Triton and torch's own kernels; all of them run."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.runs = True
        self.cold: set[int] = set()  # numbers of storages
        self._own = OwnKernels(self._note)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        run = JITFunction.run

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            result = run(kernel, *args, grid=grid, warmup=warmup, **options)
            if not warmup:
                again = partial(run, kernel, grid=grid, warmup=False)
                self.nodes.append(Call(kernel.__name__, again, args, options))
            return result

        self._stack.enter_context(patch.object(JITFunction, "run", launch))
        self._stack.enter_context(self._own)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep_cold(self, tensors: list[torch.Tensor]) -> None:
        """Fill tensors with numbers at random, and take them for too large to be in the L2 cache."""
        self._own.paused = True
        for tensor in tensors:
            fill(tensor)
        self._own.paused = False
        self.cold |= {storage_of(tensor) for tensor in tensors}

    def _note(self, _: str, call: Call) -> None:
        moved = any(torch.is_tensor(arg) and arg.device.type == "cpu" for arg in call.args)
        if not moved:  # to the device or from it: no kernel
            self.nodes.append(call)


def fill(tensor: torch.Tensor) -> None:
    """Write numbers that need as much power as a model's."""
    with torch.inference_mode():
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            tensor.normal_(0.0, 0.02)
        else:
            tensor.view(torch.uint8).random_(0, 256)


def arguments_of(call: Call, cold: set[int], count: int) -> list[Arguments]:
    """Return the arguments of a call, and copies of them in which all that is cold has memory of its own."""
    return [(call.args, call.options), *(_copied(call, cold) for _ in range(count - 1))]


def _copied(call: Call, cold: set[int]) -> Arguments:
    memory: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not torch.is_tensor(value) or storage_of(value) not in cold:
            return value
        number = storage_of(value)
        if number not in memory:
            memory[number] = _whole(value).clone()
        whole = memory[number].view(value.dtype)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    return tuple(map(copy, call.args)), {name: copy(value) for name, value in call.options.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's memory, as bytes: a kernel may read beyond the part that it was given."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)


def cold_bytes(call: Call, cold: set[int]) -> int:
    """Return the bytes of the memory that a copy of a call's arguments takes."""
    tensors = [value for value in (*call.args, *call.options.values()) if torch.is_tensor(value)]
    storages = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for number, size in storages.items() if number in cold)


def num_copies(size: int, read: float, l2_bytes: int, free_bytes: int) -> int:
    """Return how many copies, of a size, are read by turns so that none is in the L2 cache, if there is room."""
    if not size:
        return 1
    enough = math.ceil(COLD_FACTOR * l2_bytes / max(1.0, min(read, size)))
    return max(1, min(enough, MAX_COPIES, int(ROOM * free_bytes / size)))


def node_us(call: Call, cold: set[int], read: float, device: torch.device, clock: Clock = time_us) -> float:
    """Return the time of a call with the gap behind it; it reads so many bytes of what is cold."""
    torch.cuda.empty_cache()  # of the copies for the call before
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    count = num_copies(cold_bytes(call, cold), read, l2_bytes, torch.cuda.mem_get_info(device)[0])
    with torch.inference_mode():
        return clock(lambda inputs: call.run(*inputs[0], **inputs[1]), arguments_of(call, cold, count))


def sequence_us(calls: Sequence[Call], clock: Clock = time_us) -> Iterator[float]:
    """Yield the times of calls of which each needs what those before it left: what each adds to their time."""
    before = 0.0
    for end in range(1, len(calls) + 1):

        def run(_: object, some: Sequence[Call] = calls[:end]) -> None:
            for call in some:
                call.run(*call.args, **call.options)

        with torch.inference_mode():
            total = clock(run, [((), {})])
        yield total - before
        before = total
