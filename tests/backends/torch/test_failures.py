"""Errors of torch, Triton and the driver, with their real texts: what each means and what the user is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import edgelm.backends.build as build_package
import edgelm.backends.torch.build as torch_build
import edgelm.backends.torch.executor as executors
from edgelm.backends.build import build
from edgelm.backends.torch.failures import OutOfMemoryError, gpu_errors
from edgelm.config import Settings
from edgelm.errors import DeviceError, DoesNotFitError, EdgeLMError
from edgelm.kernels.choice import NoKernelError
from edgelm.machine.gpu import CudaState
from tests.engine.fake import info
from tests.tiny import write_tiny

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call.\nFor debugging consider"
FOR_GOOD = {
    "CUDA error: an illegal memory access was encountered": "use --engine llama",
    "CUDA error: device-side assert triggered": "use --engine llama",
    "CUDA error: unspecified launch failure": "use --engine llama",
    "CUDA error: misaligned address": "use --engine llama",
    "CUDA error: the launch timed out and was terminated": "use --engine llama",
    "CUDA error: uncorrectable ECC error encountered": "memory may be broken",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable": "another program holds the GPU",
    "CUDA error: no kernel image is available for execution on the device": "update the NVIDIA driver",
    "CUDA error: the provided PTX was compiled with an unsupported toolchain.": "update the NVIDIA driver",
    "CUDA driver version is insufficient for CUDA runtime version": "update the NVIDIA driver",
    "CUDA error: GPU is lost": "the GPU may be gone",
    "CUDA error: unknown error": "the GPU may be gone",
    "No CUDA GPUs are available": "the GPU may be gone",
    "Triton Error [CUDA]: an illegal memory access was encountered": "use --engine llama",
    "CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`": "use --engine llama",
}
OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


def told(error: Exception) -> EdgeLMError:
    with pytest.raises(EdgeLMError) as raised, gpu_errors():
        raise error
    assert "\n" not in str(raised.value)
    return raised.value


@pytest.mark.parametrize("text", FOR_GOOD)
def test_what_breaks_the_context_ends_the_process(text: str) -> None:
    error = told(RuntimeError(text + ADVICE))
    assert isinstance(error, DeviceError)
    assert error.message.startswith("the GPU failed: ")
    assert text.removeprefix("CUDA error: ")[:30] in error.message
    assert FOR_GOOD[text] in error.hint


@pytest.mark.parametrize("error", OF_MEMORY, ids=str)
def test_a_lack_of_memory_ends_no_process(error: Exception) -> None:
    assert isinstance(told(error), OutOfMemoryError)
    assert "lower --ctx or --parallel" in str(told(error))


def test_what_no_kernel_takes_is_said_at_once() -> None:
    error = told(NoKernelError("no implementation of attention takes this: triton: the GPU is older than sm_80"))
    assert isinstance(error, DeviceError)
    assert "use --engine llama" in error.hint


def test_a_bug_of_ours_stays_a_bug() -> None:
    for bug in (RuntimeError("The size of tensor a (3) must match"), KeyError("x"), AssertionError()):
        with pytest.raises(type(bug)), gpu_errors():
            raise bug


# -- a GPU that fails while a model is loaded --------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "m.gguf", quant="q8_0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_package, "find_cuda", lambda: CudaState("", "", "GPU X", 80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (80 * 2**30, 80 * 2**30))


CAUSES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: an illegal memory access was encountered" + ADVICE),
    RuntimeError("No CUDA GPUs are available"),
]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cause", CAUSES, ids=["memory", "illegal access", "gone"])
def test_llama_cpp_takes_a_model_that_the_gpu_cannot_load(
    cause: Exception, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise cause

    monkeypatch.setattr(torch_build, "load", fail)
    loaded = build(model, Settings(ctx=512))
    try:
        assert loaded.engine.info.engine == "llama"
    finally:
        loaded.engine.close()
    (line,) = [record.getMessage() for record in caplog.records if "without" in record.getMessage()]
    assert line.startswith("m.gguf cannot be loaded with CUDA (")
    for chosen in ({"engine": "torch"}, {"device": "cuda"}):
        with pytest.raises((DeviceError, DoesNotFitError)) as raised:
            build(model, dataclasses.replace(Settings(ctx=512), **chosen))
        assert raised.value.hint


def test_a_model_runs_without_cuda_when_it_is_told_why(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loaded = build(model, Settings(ctx=512), cuda_problem="the GPU failed twice")
    loaded.engine.close()
    assert loaded.engine.info.engine == "llama"
    assert "CUDA is not used: the GPU failed twice" in caplog.text


# -- graphs that do not fit --------------------------------------------------------------------------------------------


def test_a_capture_without_memory_goes_on_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Graphs:
        def __init__(self, *_: Any) -> None: ...

        sizes = (1,)
        record = None

        def capture(self, *_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(executors, "Graphs", Graphs)
    executor = executors.TorchExecutor.__new__(executors.TorchExecutor)
    executor._graphs, executor._device = None, torch.device("cpu")
    executor._info = info(num_vocab=50)
    executor._buffers = Sampler()  # type: ignore[assignment]
    executor._device_sampler = captured = Sampler()  # type: ignore[assignment]
    executor._capture_if_it_fits(executors.TorchOptions(context=64, capacity=64), 50)
    assert executor._graphs is None
    assert executor._device_sampler is not None
    assert executor._device_sampler is not captured, "its graphs read memory that is free now"
    assert "runs without CUDA graphs" in caplog.text


class Sampler:
    """It captures anything."""

    record = None

    def capture(self, *_: Any) -> None: ...
