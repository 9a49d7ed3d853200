"""Failures of a GPU: which of the errors of torch, Triton and the driver mean what, in one line with what to do.

Owns the kinds: a lack of memory, after which the process goes on; a compiled kernel that cannot be read; all others.
After most of those, every later call fails too (the context is broken, or the GPU is gone), and what cannot be compiled
fails again: the process ends.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from edgelm.base.errors import CompiledKernelError, DeviceError, EdgeLMError, EngineError, OutOfMemoryError
from edgelm.base.machine.gpu import driver_place
from edgelm.kernels.choice import NoKernelError

MAX_LENGTH = 200  # characters of a foreign message
NO_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",  # of pinned memory, and of the driver itself
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "NVML_SUCCESS == ",  # torch fails to describe a lack of memory, where NVML is missing
)
OF_THE_GPU = ("CUDA", "CUBLAS_", "cuDNN", "CUDNN_", "NVML_", "NVIDIA", "GPU is lost", "ECC error", "device-side assert")
BUSY = ("busy or unavailable", "in use elsewhere")
ALONE = "see what nvidia-smi says; in compute mode EXCLUSIVE_PROCESS it serves one: `sudo nvidia-smi -c 0` ends that"
# What to do, by words of the message; the first row that fits.
HINTS = (
    (("ECC error", "hardware stack error"), "the GPU's memory may be broken: see what `nvidia-smi -q` says"),
    (BUSY, f"another process uses the GPU: {ALONE}"),
    (
        (
            "unsupported toolchain",
            "driver version is insufficient",
            "driver on your system is too old",
            "no kernel image",
        ),
        f"update the NVIDIA driver{driver_place()}, or use --engine llama",
    ),
    (
        (
            "GPU is lost",
            "No CUDA GPUs",
            "no CUDA-capable device",
            "unknown error",
            "not supported on this device",
            "driver shutting down",
            "invalid device context",
            "Found no NVIDIA driver",
            "initialization error",
            "NVML",
        ),
        "the GPU may be gone: see what nvidia-smi says",
    ),
)
# torch has AcceleratorError since 2.8; DeferredCudaCallError comes while CUDA starts.
GPU_ERRORS = (
    torch.OutOfMemoryError,
    torch.cuda.DeferredCudaCallError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
TRY_AGAIN = "try again; if it happens again, use --engine llama"
LESS = "lower --ctx or --parallel, or choose a smaller --kv"
OTHER_PROGRAMS = "end other programs on it (nvidia-smi lists them)"  # loading has allocated what steps need
NOT_COMPILED = "see `edgelm doctor`, or use --engine llama"
UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError, KeyError)  # of Triton, where its cache is damaged
DAMAGED = "Triton Error [CUDA]: device kernel image is invalid"  # the driver takes no such binary


@contextmanager
def gpu_errors(hint: str = "") -> Iterator[None]:
    """Turn errors of torch, Triton and the driver into one line: OutOfMemoryError, DeviceError, CompiledKernelError.

    `hint` is what to do about a failure of the GPU, unless the failure itself tells.
    """
    try:
        yield
    except EngineError:
        raise  # of an inner block
    except NoKernelError as error:
        raise DeviceError(str(error), "use --engine llama, or --device cpu") from error
    except Exception as error:
        if _is_out_of_memory(error):
            _free_frames(error)
            if _is_of_gpu(error):
                raise OutOfMemoryError("the memory of the GPU is used up", f"{OTHER_PROGRAMS}, {LESS}") from error
            raise OutOfMemoryError("the memory is used up", LESS) from error
        if _is_of_compiler(error):
            if isinstance(error, UNREADABLE):
                reason = f"{type(error).__name__}: {_line(error)}"
                raise CompiledKernelError(f"a compiled kernel cannot be read: {reason}", _cache_hint()) from error
            raise DeviceError(f"the GPU's kernels cannot be compiled: {_line(error)}", NOT_COMPILED) from error
        if DAMAGED in str(error):
            raise CompiledKernelError(f"the GPU failed: {_line(error)}", _cache_hint()) from error
        if not _is_of_gpu(error):
            raise
        raise DeviceError(f"the GPU failed: {_line(error)}", _hint(str(error)) or hint or TRY_AGAIN) from error


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was missing, here or in a cause: then the capture of a graph fails with another error."""
    return any(
        isinstance(cause, torch.OutOfMemoryError) or any(text in str(cause) for text in NO_MEMORY)
        for cause in _causes(error)
    )


def _is_of_gpu(error: BaseException) -> bool:
    if "DefaultCPUAllocator" in str(error):
        return False
    says_so = isinstance(error, RuntimeError) and any(text in str(error) for text in OF_THE_GPU)
    return says_so or isinstance(error, GPU_ERRORS)


def _is_of_compiler(error: BaseException) -> bool:
    """Return whether Triton, or a program that it started, failed; a launch that fails is the GPU's error."""
    if "[CUDA]" in str(error) or isinstance(error, (*GPU_ERRORS, EdgeLMError)):
        return False
    return _is_of_triton(type(error).__module__) or any(map(_is_of_triton, _modules(error.__traceback__)))


def _is_of_triton(module: str) -> bool:
    return module.partition(".")[0] == "triton"


def _cache_hint() -> str:
    from triton import knobs  # not at the top: on the processor there may be no Triton

    return f"Triton's cache may be damaged: remove {knobs.cache.dir}, or use --engine llama"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it comes from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _modules(trace: TracebackType | None) -> Iterator[str]:
    """Yield the names of the modules that an error went through."""
    while trace is not None:
        yield trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next


def _free_frames(error: BaseException) -> None:
    """Free the tensors of the functions that failed: an error keeps them alive until its client has read it."""
    for cause in _causes(error):
        traceback.clear_frames(cause.__traceback__)


def _line(error: BaseException) -> str:
    """Return the first line of a message, in bounds."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= MAX_LENGTH else f"{line[:MAX_LENGTH]}…"


def _hint(message: str) -> str:
    return next((hint for texts, hint in HINTS if any(text in message for text in texts)), "")
