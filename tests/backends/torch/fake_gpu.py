"""A fake GPU: tensors with shapes but no numbers, kernel launches that are recorded but not run.

    with FakeGpu() as gpu: ...

Its tensors are on torch's device "meta" and claim to be on CUDA; every number copied back is 1. Host tensors are real.
Owns checks of the host's possible mistakes: reading a number from the device, mixing devices, copying or waiting during
the capture of a graph, passing host memory to a kernel. Triton itself looks up the kernel of a launch, by the types,
values and alignments of its arguments, as it does on a GPU; nothing is compiled. Memory is counted as torch's allocator
counts it. Triton must not interpret in this process, so tests run it in a child. Knows nothing of kernels.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from edgelm.backends.torch import executor, load_tuning
from edgelm.backends.torch.compilation import Compilation
from edgelm.kernels import gpu_target
from tests.backends.torch.fake_pools import GraphPools

HOST, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
DEVICE_OF, IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__
MOVES = frozenset({torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu})
READS = frozenset({torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.numpy, torch.nonzero})
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
UPLOADING = frozenset({torch.tensor, torch.as_tensor})  # their numbers come from the host
ALLOCATED = 512  # bytes: torch's allocator aligns memory to them, and rounds sizes up


class Pointer:
    """A tensor of the fake GPU as a launch sees it."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class FakeDriver:
    """The driver that Triton asks for the GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class FakeGpu(TorchFunctionMode):
    """An H200. `launches` counts kernels by name, `captured` those of each graph, `copies` transfers by direction.

    `blocking` counts the copies that the host waits for; events are not counted. `own` counts torch's own kernels by
    name, `own_captured` those in graphs. `pools` is the memory of the graphs,
    `waits` counts the calls that wait for all work of the device. `compiled` are the kernels that a GPU would have
    compiled, in order: the name and the key by which Triton finds one, `ahead` those that several processes would have
    compiled before. With each replay of a graph `clock_us` goes on by what `launch_us` says of its launches, from the
    name and the options of a kernel. `live_bytes` are those of tensors outside of graphs, `peak_bytes` the most so far;
    it may be set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.ahead: set[tuple[str, str]] = set()
        self.captured: list[Counter[str]] = []
        self.replays = 0
        self.clock_us = 0.0
        self.launch_us: Callable[[str, dict[str, Any]], float] = lambda _name, _options: 1.0
        self._recorded: list[tuple[str, dict[str, Any]]] = []  # launches of the present capture
        self.copies: Counter[str] = Counter()  # "up" and "down"
        self.blocking = 0
        self.own: Counter[str] = Counter()
        self.own_captured: Counter[str] = Counter()
        self.pools = GraphPools()
        self.waits = 0
        self._place: tuple[object, object] = (None, None)  # pool and stream of the present capture
        self._capturing: Counter[str] | None = None
        self._stack = ExitStack()
        self.compiled: list[tuple[str, str]] = []
        self.live_bytes = self.peak_bytes = 0
        self._addresses: dict[int, int] = {}  # of storages, by the address of their object
        self._free_address = 0

    def __enter__(self) -> Self:
        properties = SimpleNamespace(
            name="NVIDIA H200",
            major=9,
            minor=0,
            multi_processor_count=132,
            total_memory=141 * 2**30,
            L2_cache_size=50 * 2**20,
        )
        gpu = self

        class Event:
            def __init__(self, **_: object) -> None: ...

            def record(self, *_: object) -> None:
                self.at_us = gpu.clock_us

            def elapsed_time(self, end: Event) -> float:
                return (end.at_us - self.at_us) / 1e3

            def synchronize(self) -> None:
                gpu._on_the_host("an event is waited for")

        class Stream:
            def wait_stream(self, _: object) -> None: ...

            def synchronize(self) -> None:
                gpu._wait()

        class Graph:
            own_pool: object = None
            launches: tuple[tuple[str, dict[str, Any]], ...] = ()

            def pool(self) -> object:
                return self.own_pool

            def replay(self) -> None:
                gpu.replays += 1
                gpu.clock_us += sum(gpu.launch_us(*launch) for launch in self.launches)

        @contextmanager
        def capture(graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
            assert gpu._capturing is None
            graph.own_pool = pool or object()
            gpu._place = graph.own_pool, stream
            gpu._capturing = Counter()
            gpu._recorded = []
            try:
                yield
                graph.launches = tuple(gpu._recorded)
                gpu.captured.append(gpu._capturing)
            finally:
                gpu._capturing = None

        @contextmanager
        def on_stream(_: Stream) -> Iterator[None]:
            yield

        cuda: dict[str, object] = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_device_name": lambda *_: properties.name,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: properties,
            "mem_get_info": lambda *_: (100 * 2**30, properties.total_memory),
            "empty_cache": lambda: None,
            "synchronize": lambda *_: self._wait(),
            "is_current_stream_capturing": lambda: gpu._capturing is not None,
            "Event": Event,
            "Stream": Stream,
            "current_stream": lambda *_: Stream(),
            "stream": on_stream,
            "CUDAGraph": Graph,
            "graph": capture,
        }
        for name, value in cuda.items():
            self._stack.enter_context(patch.object(torch.cuda, name, value))
        self._stack.enter_context(patch.object(JITFunction, "run", self._launch()))
        self._stack.enter_context(patch.object(knobs.runtime, "jit_cache_hook", self._compile))
        self._stack.enter_context(patch.object(executor, "compile_kernels", self._compile_ahead))
        self._stack.enter_context(patch.object(load_tuning, "compile_kernels", self._compile_ahead))
        compiled = property(lambda compilation: (compilation.name, compilation.key) in gpu.ahead)
        self._stack.enter_context(patch.object(Compilation, "is_done", compiled))
        gpu_target.kwidth()  # compiles its probe, which no hook may prevent
        driver.set_active(FakeDriver())
        self._stack.callback(driver.set_active, None)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == DEVICE_OF:
            return CUDA if func(*args) == META else func(*args)
        result = self._call(func, args, dict(kwargs or {}))
        if _computes(func.__name__, result, args):
            (self.own if self._capturing is None else self.own_captured)[func.__name__] += 1
        if self._capturing is not None:
            self.pools.allocate(*self._place, result, (*args, *(kwargs or {}).values()))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if type(tensor) is torch.Tensor and tensor.is_meta:
                self._address_of(tensor)
        return result

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs.pop("pin_memory", None)
        if func == IS_CUDA:
            return DEVICE_OF(*args) == META
        if "device" in kwargs and kwargs["device"] is not None and func not in MOVES:
            if torch.device(kwargs["device"]).type == CUDA.type:
                if func in UPLOADING:
                    self._transfer("up", blocking=True)
                kwargs["device"] = META
            return func(*args, **kwargs)
        if func in MOVES:
            return self._moved(func, args, kwargs)
        if func is torch.Tensor.copy_ and is_on_gpu(args[0]) != is_on_gpu(args[1]):
            return self._copied(args[0], args[1], blocking=not kwargs.get("non_blocking"))
        if func is torch.Tensor.__setitem__ and torch.is_tensor(args[2]) and is_on_gpu(args[0]) != is_on_gpu(args[2]):
            self._copied(args[0][args[1]], args[2], blocking=True)
            return None
        if func in READS:
            assert not is_on_gpu(args[0]), f"{func.__name__}: a number is read from the device"
        if func is torch.Tensor.data_ptr and is_on_gpu(args[0]):
            return self._address_of(args[0])
        tensors = [x for x in (*args, *kwargs.values()) if torch.is_tensor(x) and x.ndim]
        assert len({is_on_gpu(x) for x in tensors}) < 2, f"{func.__name__} mixes devices"
        return func(*args, **kwargs)

    def _moved(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        options = [*args[1:], *kwargs.values()]
        target = next((torch.device(x) for x in options if isinstance(x, str | torch.device)), None)
        target = {torch.Tensor.cuda: CUDA, torch.Tensor.cpu: HOST}.get(func, target)
        to_gpu = is_on_gpu(tensor) if target is None else target.type == CUDA.type
        dtype = next((x for x in options if isinstance(x, torch.dtype)), tensor.dtype)
        if to_gpu == is_on_gpu(tensor):
            return func(tensor, dtype) if func is torch.Tensor.to else tensor
        self._transfer("up" if to_gpu else "down", blocking=not kwargs.get("non_blocking"))
        return torch.zeros(tensor.shape, dtype=dtype, device=META if to_gpu else HOST)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, *, blocking: bool) -> torch.Tensor:
        assert target.shape == torch.broadcast_shapes(target.shape, source.shape), (target.shape, source.shape)
        self._transfer("up" if is_on_gpu(target) else "down", blocking=blocking)
        return target if is_on_gpu(target) else target.fill_(1)

    def _transfer(self, direction: str, *, blocking: bool) -> None:
        self._on_the_host(f"something is copied {direction}")
        self.copies[direction] += 1
        self.blocking += blocking

    def _wait(self) -> None:
        self._on_the_host("the device is waited for")
        self.waits += 1

    def _on_the_host(self, action: str) -> None:
        assert self._capturing is None, f"{action} while a graph is captured"

    def _address_of(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor; its memory is allocated when it is seen first, and freed at its end."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self._addresses:
            size = -(-storage.nbytes() // ALLOCATED) * ALLOCATED
            self._addresses[number] = self._free_address
            self._free_address += max(size, ALLOCATED)
            if self._capturing is not None:
                size = 0  # of the graph
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._free, number, size).atexit = False
        return self._addresses[number] + tensor.storage_offset() * tensor.itemsize

    def _free(self, number: int, size: int) -> None:
        del self._addresses[number]
        self.live_bytes -= size

    def _launch(self) -> Callable[..., Any]:
        find_kernel = JITFunction.run

        def pointer(value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            return Pointer(value.dtype, self._address_of(value))

        def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            named = itertools.chain(zip(kernel.arg_names, args, strict=False), kwargs.items())
            with torch._C.DisableTorchFunction():
                for name, value in named:
                    assert not torch.is_tensor(value) or value.is_meta, f"{kernel.__name__}: {name} is on the host"
                pointers = [pointer(value) for value in args]
                options = {name: pointer(value) for name, value in kwargs.items()}
            found = find_kernel(kernel, *pointers, grid=grid, warmup=True, **options)
            if warmup:
                return found
            size = grid(options) if callable(grid) else grid
            assert all(isinstance(n, int) and n > 0 for n in size), (kernel.__name__, size)
            self.launches[kernel.__name__] += 1
            if self._capturing is not None:
                self._capturing[kernel.__name__] += 1
                self._recorded.append((kernel.__name__, kwargs))
            return found

        return run

    def _compile_ahead(self, needed: list[Compilation], _: object, **__: object) -> None:
        self.ahead |= {(compilation.name, compilation.key) for compilation in needed}

    def _compile(self, *, key: str, fn: Any, **_: object) -> bool:
        """Note a kernel that Triton does not have, and give it one, so that it has it from now on."""
        kernel = fn.jit_function
        self.compiled.append((kernel.__name__, key))
        self._stack.callback(kernel.device_caches.clear)
        kernel.device_caches[0][0][key] = object()
        return True


def _computes(name: str, result: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a function of torch runs a kernel: its result on the fake GPU is neither a view nor empty."""
    if not torch.is_tensor(result) or not result.is_meta or name in EMPTY:
        return False
    given = [arg for arg in args if torch.is_tensor(arg)]
    if name.endswith("_") and not name.endswith("__"):
        return all(is_on_gpu(arg) for arg in given)  # else it is a copy
    return result.untyped_storage()._cdata not in {arg.untyped_storage()._cdata for arg in given}


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the fake GPU."""
    return tensor.is_meta
