"""Compiling the kernels of a model in several processes, before they are launched first.

Owns the number of processes, and what happens where one fails. The results go through Triton's cache on disk, where
this process and the next one find them. Threads are as fast on two cores; but a compiler that crashes or hangs must not
take the engine with it, and about a seventh of the work holds Python's lock. Knows nothing of which kernels a model
launches.
"""

from __future__ import annotations

import base64
import logging
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgelm.base.errors import DeviceError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.workers.parent import Worker

if TYPE_CHECKING:  # Triton is not installed everywhere
    from edgelm.backends.torch.compilation import Compilation

log = logging.getLogger(__name__)

WORKER = "edgelm.backends.torch.compile_worker"
KERNELS_EACH = 3  # of a process, at least: its start takes as long as they do
MAX_WORKERS = 16
WORKER_BYTES = 700 * 2**20  # torch, Triton, and a large kernel in LLVM
ATTEMPTS = 2  # for a kernel whose process dies: it may have been killed for lack of memory
LIMIT_S = 300.0  # for one kernel, which takes about a second
HINT = "see `edgelm doctor`, or use --engine llama"

Progress = Callable[[int, int], None]  # receives how many kernels are compiled, and how many there are


@dataclass(frozen=True, slots=True)
class Compile:
    """Compile a kernel."""

    pickled: str  # a Compilation, in base 64


@dataclass(frozen=True, slots=True)
class Compiled:
    """The kernel is in the cache."""


def compile_kernels(
    needed: Sequence[Compilation], on_progress: Progress, workers: int | None = None, *, must: bool = True
) -> None:
    """Compile those kernels that the cache on disk does not have; `workers` defaults to what the machine allows.

    A few kernels are left to their first launch. Where a kernel cannot be compiled, this raises DeviceError; if not all
    kernels `must` be compiled, the others are. An exception of `on_progress` ends the work.
    """
    missing = [compilation for compilation in needed if not compilation.is_done]
    count = min(workers or _num_workers(), len(missing) // KERNELS_EACH)
    if count < 2:
        return
    log.info("%d of %d kernels are compiled, by %d processes", len(missing), len(needed), count)
    with ExitStack() as stack:
        pool = _Pool(stack, count)
        threads = stack.enter_context(ThreadPoolExecutor(count))
        try:
            jobs = [threads.submit(pool.compile, compilation) for compilation in missing]
            on_progress(0, len(jobs))
            for done, job in enumerate(as_completed(jobs), 1):
                try:
                    job.result()
                except DeviceError as error:
                    if must:
                        raise
                    log.warning("%s", error.message)
                on_progress(done, len(jobs))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            pool.stop()
            raise


def _num_workers() -> int:
    return min(usable_cores().physical, available_memory_bytes() // WORKER_BYTES, MAX_WORKERS)


class _Pool:
    """Processes that compile one kernel each at a time, for as many threads; `stack` ends them."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self._stack = stack
        self._workers: list[Worker] = []
        self._idle: deque[Worker] = deque()
        self._stopped = False
        for _ in range(count):  # now, so that they start beside each other
            self._idle.append(self._start())

    def compile(self, compilation: Compilation) -> None:
        """Compile a kernel; if its process dies, in another one. Raises DeviceError."""
        request = Compile(base64.b64encode(pickle.dumps(compilation)).decode())
        for _ in range(ATTEMPTS):
            end = self._ask(request, compilation.name)
            if end is None:
                return
            log.warning("a process that compiled %s %s", compilation.name, end)
        raise DeviceError(f"the GPU's kernel {compilation.name} cannot be compiled: the compiler {end}", HINT)

    def stop(self) -> None:
        """Let `compile` fail soon in all threads."""
        self._stopped = True
        for worker in tuple(self._workers):
            worker.kill_group()

    def _ask(self, request: Compile, name: str) -> str | None:
        """Let a process compile a kernel; return how it died, and None if it did not."""
        if self._stopped:
            raise DeviceError(f"the GPU's kernel {name} is not compiled: another one failed", HINT)
        try:
            worker = self._idle.popleft()
        except IndexError:  # it died
            worker = self._start()
        worker.send(request)
        try:
            reply = worker.receive(LIMIT_S)
        except TimeoutError:
            worker.kill_group()
            raise DeviceError(f"the GPU's kernel {name} is not compiled after {LIMIT_S:.0f} s", HINT) from None
        if reply is None:
            end = worker.exit()
            return f"{end.how} ({end.last_line})" if end.last_line else end.how
        self._idle.append(worker)
        return None

    def _start(self) -> Worker:
        worker = Worker(WORKER, replies=(Compiled,), errors=(DeviceError,), environment={"CUDA_VISIBLE_DEVICES": ""})
        self._workers.append(worker)
        return self._stack.enter_context(worker)
