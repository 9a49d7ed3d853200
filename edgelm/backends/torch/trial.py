"""Trials of the GPU: one small kernel is compiled, launched and checked, and every way to fail is one line.

It proves the C compiler, Python's headers, ptxas, the driver and the architecture at once. A second trial is of kernels
that begin while the one before them still runs. Owns what each failure means and what to do about it. Knows nothing of
models.
"""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from edgelm.backends.torch.failures import ALONE, BUSY, gpu_errors
from edgelm.base.errors import DeviceError, EngineError
from edgelm.base.machine.gpu import driver_place
from edgelm.base.machine.llama_build import install_command
from edgelm.kernels.gpu_target import num_sms
from edgelm.kernels.trial import PART, SIZE, chain, chained, product

OR_LLAMA = "or use --engine llama"
LINKS = 16  # kernels of a chain
ROUNDS = 2000  # several microseconds
REPLAYS = 3


def run_trial(device: torch.device) -> None:
    """Multiply two small matrices on the device. Raises EngineError if that fails, or gives other numbers."""
    with explained(), gpu_errors():
        x = torch.arange(SIZE * SIZE, device=device).reshape(SIZE, SIZE) % 7
        out = torch.full((SIZE, SIZE), torch.nan, device=device)
        product(x.half(), x.half(), out)
        wrong = out.cpu() != x.cpu().float() @ x.cpu().float()
    if wrong.any():
        message = f"the GPU computes wrongly: {int(wrong.sum())} of {SIZE * SIZE} numbers of a small product"
        raise DeviceError(message, f"update the NVIDIA driver{driver_place()}, {OR_LLAMA}")


def chain_is_right(device: torch.device, rounds: int = ROUNDS) -> bool:
    """Return whether each kernel of a chain waits for the one before: launched one by one, and in a CUDA graph."""
    first = torch.arange(2 * num_sms(device) * PART, dtype=torch.int32, device=device).reshape(-1, PART)
    x, spare = first.clone(), torch.zeros_like(first)
    with gpu_errors():
        chain(x, spare, LINKS, rounds)
        times = 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain(x, spare, LINKS, rounds)
            for _ in range(REPLAYS):
                graph.replay()
            times += REPLAYS
        return torch.equal(x.cpu(), chained(first.cpu(), times * LINKS, rounds))


@contextmanager
def explained() -> Iterator[None]:
    """Turn what Triton raises where it cannot compile into an EngineError that says what is missing."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, EngineError) else error
        for matches, explain in _CAUSES:
            if cause is not None and matches(cause):
                raise explain(cause) from cause
        raise


def _has_headers() -> bool:
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def _no_compiler(_: BaseException) -> EngineError:
    without_root = install_command("ziglang")
    hint = f"`sudo apt install build-essential` or your system's gcc; without root, {without_root}; {OR_LLAMA}"
    return DeviceError("Triton needs a C compiler, and there is none", hint)


def _no_cache(error: BaseException) -> EngineError:
    reason = getattr(error, "strerror", None) or "it is not writable"
    return DeviceError(f"Triton cannot write its cache: {reason}", f"set TRITON_CACHE_DIR to a folder, {OR_LLAMA}")


def _not_loaded(_: BaseException) -> EngineError:
    message = "Triton cannot load what it compiled: its cache is on a file system without programs (noexec)"
    return DeviceError(message, f"set TRITON_CACHE_DIR to a folder elsewhere, {OR_LLAMA}")


def _missing_program(error: BaseException) -> EngineError:
    name = error.filename if isinstance(error, FileNotFoundError) else ""
    return DeviceError(
        f"Triton cannot start {name}, which is not there", f"install it, unset CC if that names it, {OR_LLAMA}"
    )


def _compiler_failed(_: BaseException) -> EngineError:
    if not _has_headers():
        hint = f"`sudo apt install python3-dev` or your system's like, {OR_LLAMA}"
        return DeviceError("Triton needs the header files of Python, and Python.h is not there", hint)
    return DeviceError("the C compiler fails for Triton", f"see the log with -v, {OR_LLAMA}")


def _no_ptxas(_: BaseException) -> EngineError:
    return DeviceError("Triton's ptxas is missing or cannot be run", f"reinstall triton, {OR_LLAMA}")


def _unknown_target(error: BaseException) -> EngineError:
    name = next((word.strip("'") for word in str(error).split() if word.strip("'").startswith("sm_")), "this GPU")
    message = f"triton {version('triton')} cannot compile for {name}"
    return DeviceError(message, f"see whether a newer edgelm[cuda] can, {OR_LLAMA}")


def _no_driver(_: BaseException) -> EngineError:
    return DeviceError(
        "the driver's library libcuda.so is not found", f"install the NVIDIA driver{driver_place()}, {OR_LLAMA}"
    )


def _too_large(error: BaseException) -> EngineError:
    return DeviceError(f"the GPU is too small for a small kernel: {error}", "use --engine llama")


def _busy(_: BaseException) -> EngineError:
    """Explain that this process may not use the GPU beside another one, which lasts no longer than that one does.

    It may be the engine that waits for this check.
    """
    return EngineError("the GPU cannot be used by another process now", ALONE)


_Cause = tuple[Callable[[BaseException], bool], Callable[[BaseException], EngineError]]
_CAUSES: tuple[_Cause, ...] = (
    (lambda error: any(text in str(error) for text in BUSY), _busy),
    (lambda error: "Failed to find C compiler" in str(error), _no_compiler),
    (lambda error: isinstance(error, subprocess.CalledProcessError), _compiler_failed),
    (lambda error: isinstance(error, ImportError) and "map segment" in str(error), _not_loaded),
    (lambda error: isinstance(error, PermissionError) or "cache" in str(getattr(error, "filename", "")), _no_cache),
    (lambda error: isinstance(error, FileNotFoundError), _missing_program),
    (lambda error: any(text in str(error) for text in ("gpu-name", "PassManager::run failed")), _unknown_target),
    (lambda error: "ptxas" in str(error).lower() and not isinstance(error, EngineError), _no_ptxas),
    (lambda error: "libcuda.so" in str(error), _no_driver),
    (lambda error: type(error).__name__ == "OutOfResources", _too_large),
)


@contextmanager
def nan_filled() -> Iterator[None]:
    """Let torch fill new tensors with NaN, or with the largest whole number."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
