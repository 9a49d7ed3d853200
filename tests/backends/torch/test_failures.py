"""Failures of a GPU on the processor: messages of torch, Triton and the driver, and steps that need too much memory."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import weakref
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime.errors import OutOfResources, PTXASError

from edgelm.backends.build import build
from edgelm.backends.torch import self_check
from edgelm.backends.torch.executor import TorchExecutor, parts_of
from edgelm.backends.torch.failures import ALONE, LESS, NOT_COMPILED, OTHER_PROGRAMS, TRY_AGAIN, gpu_errors
from edgelm.base.config import Settings
from edgelm.base.errors import (
    CompiledKernelError,
    DeviceError,
    EngineError,
    LostStepError,
    ModelError,
    OutOfMemoryError,
)
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.core import Chunk, SamplingParams, Sequence, StateSpan, Step
from edgelm.evaluation import evaluate
from edgelm.kernels.choice import NoKernelError
from edgelm.models.decoder import Decoder
from tests.backends.torch.torch_engine import load_gguf, make_executor, running
from tests.odd_models import write_odd
from tests.tiny import write_tiny

MORE_LINES = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""
USED_UP = "the memory of the GPU is used up"
BROKEN = "the GPU's memory may be broken: see what `nvidia-smi -q` says"
BUSY = f"another process uses the GPU: {ALONE}"
UPDATE = "update the NVIDIA driver, or use --engine llama"
CACHE = f"Triton's cache may be damaged: remove {knobs.cache.dir}, or use --engine llama"
GONE = "the GPU may be gone: see what nvidia-smi says"


def cuda(message: str) -> Exception:
    return torch.AcceleratorError(f"CUDA error: {message}{MORE_LINES}")


def failed(message: str) -> str:
    return f"the GPU failed: CUDA error: {message}"


OUT_OF_MEMORY: list[tuple[Exception, str]] = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacity of"), USED_UP),
    (cuda("out of memory"), USED_UP),
    (RuntimeError("Triton Error [CUDA]: out of memory"), USED_UP),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), USED_UP),
    (RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":995'), USED_UP),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        "the memory is used up",
    ),
]
LOST: list[tuple[Exception, str, str]] = [
    *(
        (cuda(message), failed(message), hint)
        for message, hint in [
            ("an illegal memory access was encountered", TRY_AGAIN),
            ("device-side assert triggered", TRY_AGAIN),
            ("unspecified launch failure", TRY_AGAIN),
            ("misaligned address", TRY_AGAIN),
            ("the launch timed out and was terminated", TRY_AGAIN),
            ("invalid argument", TRY_AGAIN),
            ("CUDA-capable device(s) is/are busy or unavailable", BUSY),
            ("uncorrectable ECC error encountered", BROKEN),
            ("unknown error", GONE),
            ("no CUDA-capable device is detected", GONE),
            ("driver shutting down", GONE),
            ("the provided PTX was compiled with an unsupported toolchain.", UPDATE),
            ("no kernel image is available for execution on the device", UPDATE),
        ]
    ),
    (
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        "the GPU failed: Triton Error [CUDA]: an illegal memory access was encountered",
        TRY_AGAIN,
    ),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`"),
        failed("CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`"),
        TRY_AGAIN,
    ),
    (RuntimeError("No CUDA GPUs are available"), "the GPU failed: No CUDA GPUs are available", GONE),
    (
        RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update"),
        "the GPU failed: The NVIDIA driver on your system is too old (found version 11040). Please update",
        UPDATE,
    ),
    (
        torch.cuda.DeferredCudaCallError("CUDA call failed lazily at initialization with error: x\n\nCUDA call"),
        "the GPU failed: CUDA call failed lazily at initialization with error: x",
        TRY_AGAIN,
    ),
    (
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        "the GPU failed: Triton Error [CUDA]: device kernel image is invalid",
        CACHE,
    ),
    (
        PTXASError("ptxas fatal   : Value 'sm_130' is not defined\nmore"),
        "the GPU's kernels cannot be compiled: PTXAS error: ptxas fatal : Value 'sm_130' is not defined",
        NOT_COMPILED,
    ),
    (
        OutOfResources(131072, 101376, "shared memory"),
        f"the GPU's kernels cannot be compiled: {OutOfResources(131072, 101376, 'shared memory')}",
        NOT_COMPILED,
    ),
    (
        NoKernelError("no implementation of attend takes this: triton: it has heads of 48"),
        "no implementation of attend takes this: triton: it has heads of 48",
        "use --engine llama, or --device cpu",
    ),
]


@pytest.mark.parametrize(("error", "message"), OUT_OF_MEMORY, ids=lambda value: str(value)[:40])
def test_a_lack_of_memory_leaves_the_process_alive(error: Exception, message: str) -> None:
    with pytest.raises(OutOfMemoryError) as caught, gpu_errors():
        raise error
    hint = f"{OTHER_PROGRAMS}, {LESS}" if message == USED_UP else LESS
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert not isinstance(caught.value, DeviceError)


@pytest.mark.parametrize(("error", "message", "hint"), LOST, ids=lambda value: str(value)[:40])
def test_any_other_failure_ends_it(error: Exception, message: str, hint: str) -> None:
    with pytest.raises(DeviceError) as caught, gpu_errors():
        raise error
    assert (caught.value.message, caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc", "driver.c"]),
        FileNotFoundError(2, "No such file or directory", "ptxas"),
        TypeError("unsupported operand"),
    ],
    ids=type,
)
def test_what_triton_starts_is_a_failure_to_compile(error: Exception) -> None:
    with pytest.raises(DeviceError, match="kernels cannot be compiled: ") as caught, gpu_errors():
        raise_in_triton(error)
    assert caught.value.hint == NOT_COMPILED
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (json.JSONDecodeError("Expecting value", "", 0), "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (KeyError("Unknown key: 'cubin'"), "KeyError: \"Unknown key: 'cubin'\""),
    ],
    ids=["metadata", "binary"],
)
def test_a_damaged_cache_of_triton_is_told_with_its_folder(error: Exception, reason: str) -> None:
    """It is no failure of the kernel: a check would have plain torch compute the op from then on."""
    with pytest.raises(CompiledKernelError) as caught, gpu_errors(), gpu_errors():
        raise_in_triton(error)
    assert caught.value.message == f"a compiled kernel cannot be read: {reason}"
    assert caught.value.hint == CACHE


def test_a_binary_that_the_driver_refuses_is_no_verdict_about_its_kernel() -> None:
    with pytest.raises(CompiledKernelError), gpu_errors():
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")


def raise_in_triton(error: Exception) -> None:
    """Raise an error from a function whose module is Triton's."""

    def run() -> None:
        raise error

    FunctionType(run.__code__, {"__name__": "triton.runtime.build"}, closure=run.__closure__)()


def test_an_error_that_is_ours_already_is_no_failure_of_triton() -> None:
    with pytest.raises(ModelError, match="loading was cancelled"), gpu_errors():
        raise_in_triton(ModelError("loading was cancelled"))


@pytest.mark.parametrize(
    "error", [AssertionError("CUDA"), ValueError("x"), RuntimeError("shapes differ"), KeyError("a")]
)
def test_our_own_bugs_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, gpu_errors():
        raise error
    assert caught.value is error


# -- too little memory for a step --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", quant="f32", width=64, ffn=128, head_dim=32)
    return load_gguf(path)


class ShortOfMemory:
    """Lets the passes of an executor with more than so many tokens run out of memory. `held` are their tensors."""

    def __init__(self, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.max_tokens = max_tokens
        self.sizes: list[int] = []
        self.held: list[weakref.ref[Any]] = []
        run = TorchExecutor._run

        def short(executor: TorchExecutor, tensors: Any) -> Any:
            assert all(tensor() is None for tensor in self.held), "memory of the failed try is still taken"
            self.sizes.append(len(tensors.ids))
            if len(tensors.ids) > self.max_tokens:
                self._fail()
            return run(executor, tensors)

        monkeypatch.setattr(TorchExecutor, "_run", short)

    def _fail(self) -> None:
        temporary = torch.zeros(100)
        self.held.append(weakref.ref(temporary))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


async def answer(engine: Any, tokens: list[int], count: int = 6) -> list[int]:
    stream = engine.submit(tokens, SamplingParams(temperature=0, max_tokens=count))
    return [sample.id for event in [event async for event in stream] for sample in event.sampled]


PROMPTS = [[5 + i % 90 for i in range(150)], [7, 8, 9], [11] * 70]


def test_a_step_that_needs_too_much_memory_is_computed_in_parts(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> list[list[int]]:
        with running(decoder, capacity=1024) as engine:
            return list(await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS)))

    plain = asyncio.run(ask())
    memory = ShortOfMemory(64, monkeypatch)
    gc.disable()  # the memory must be free without the garbage collector
    try:
        assert asyncio.run(ask()) == plain
    finally:
        gc.enable()
    assert max(memory.sizes) > 64
    assert "the memory of the GPU is used up: a step of" in caplog.text


def test_an_answer_that_needs_too_much_in_any_case_fails_alone(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ShortOfMemory(20, monkeypatch)

    async def ask() -> None:
        with running(decoder, capacity=1024) as engine:
            with pytest.raises(
                EngineError, match=f"{USED_UP}; end other .*, {LESS}"
            ) as _kept:  # as long as its client reads it
                await answer(engine, PROMPTS[0])
            assert len(await answer(engine, PROMPTS[1])) == 6
            memory.max_tokens = 1000
            assert len(await answer(engine, PROMPTS[0])) == 6

    asyncio.run(ask())


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_gguf(write_odd(tmp_path_factory.mktemp("odd") / "m.gguf", "qwen35", 3))


class LateShortage(ShortOfMemory):
    """Lets passes fail behind their first layers, whose recurrent states have moved."""

    def __init__(self, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(10**6, monkeypatch)
        recur = Decoder._recur

        def short(decoder: Decoder, layer: Any, stream: Any, *args: Any) -> Any:
            result = recur(decoder, layer, stream, *args)
            if layer is decoder.weights.layers[1].attention and len(stream.residual) > max_tokens:
                self._fail()
            return result

        monkeypatch.setattr(Decoder, "_recur", short)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_answers_with_recurrent_states_survive_a_step_that_needs_too_much_memory(
    runs_ahead: bool, recurrent: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(engine: Any) -> list[list[int]]:
        return list(await asyncio.gather(*(answer(engine, prompt, 20) for prompt in PROMPTS)))

    options = {"capacity": 1024, "runs_ahead": runs_ahead}
    with running(recurrent, **options) as engine:
        plain = asyncio.run(ask(engine))
    memory = LateShortage(64, monkeypatch)
    gc.disable()
    try:
        with running(recurrent, **options) as engine:
            assert [asyncio.run(ask(engine)) for _ in range(2)] == [plain] * 2
    finally:
        gc.enable()
    assert max(memory.sizes) > 64
    assert re.findall(f"{USED_UP} by a step of .*", caplog.text) == [
        f"{USED_UP} by a step of {max(memory.sizes)} tokens; all running requests are computed again"
    ]
    assert "in parts" not in caplog.text


def test_whole_steps_are_tried_again_after_a_while(
    recurrent: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("edgelm.backends.torch.executor.NUM_IN_PARTS", 2)
    memory = LateShortage(64, monkeypatch)
    with running(recurrent) as engine:
        for first in range(4):
            assert len(asyncio.run(answer(engine, [first, *PROMPTS[0]]))) == 6
    assert caplog.text.count("all running requests are computed again") > 1
    assert memory.sizes.count(max(memory.sizes)) > 1


def test_small_steps_behind_a_lost_one_are_whole(recurrent: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = LateShortage(64, monkeypatch)
    executor = make_executor(recurrent, capacity=512, recomputes=True)
    seqs = [Sequence(i, [5] * 80, 80, SamplingParams()) for i in range(2)]

    def run(start: int, count: int, *numbers: int) -> None:
        spans = [(seqs[i], StateSpan(i, start, start + count), tuple(range(8 * i, 8 * i + 8))) for i in numbers]
        executor.forward(Step(tuple(Chunk(seq, start, [5] * count, 1, kv, span) for seq, span, kv in spans)))

    with pytest.raises(LostStepError):
        run(0, 70, 0)
    memory.sizes.clear()
    run(0, 70, 0)
    run(0, 70, 1)
    for length in range(70, 75):
        run(length, 1, 0, 1)
    assert memory.sizes == [64, 6, 64, 6, 2, 2, 2, 2, 2]


def test_a_small_step_that_was_lost_is_computed_in_parts(
    recurrent: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running(recurrent) as engine:
        plain = [asyncio.run(answer(engine, prompt, 30)) for prompt in PROMPTS]
    forward = TorchExecutor._forward

    failures = iter(range(9))

    def short(executor: TorchExecutor, step: Step) -> Any:
        if len(step.chunks) > 1 and step.num_tokens < 9 and next(failures, None) is not None:
            raise OutOfMemoryError(USED_UP)
        return forward(executor, step)

    async def ask(engine: Any) -> list[list[int]]:
        return list(await asyncio.gather(*(answer(engine, prompt, 30) for prompt in PROMPTS)))

    monkeypatch.setattr(TorchExecutor, "_forward", short)
    with running(recurrent, capacity=1024) as engine:
        assert asyncio.run(ask(engine)) == plain
    assert 1 <= caplog.text.count("all running requests are computed again") <= 2, "3 tokens, then 2"


def test_an_answer_with_states_that_needs_too_much_in_any_case_fails_alone(
    recurrent: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ShortOfMemory(20, monkeypatch)

    async def ask() -> None:
        with running(recurrent, capacity=1024) as engine:
            with pytest.raises(EngineError, match=USED_UP):
                await answer(engine, PROMPTS[0])
            assert len(await answer(engine, PROMPTS[1])) == 6
            memory.max_tokens = 1000
            assert len(await answer(engine, PROMPTS[0])) == 6

    asyncio.run(ask())


def test_a_step_with_states_is_no_lost_one_for_those_who_cannot_compute_it_again(
    recurrent: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The check of the kernels and evaluations run such steps, and build the engine that does recompute."""
    memory = ShortOfMemory(8, monkeypatch)
    with pytest.raises(OutOfMemoryError) as failed:
        evaluate.run_tokens(make_executor(recurrent, max_rows=150), PROMPTS[0])
    assert failed.value.hint.endswith(LESS)
    assert self_check._num_kernels(recurrent, None, torch.device("cpu"), ["f16"], short=False) == 0
    assert max(memory.sizes) > 64
    assert not caplog.text


def test_the_engine_that_serves_computes_a_lost_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_odd(tmp_path / "m.gguf", "qwen35", 3)
    places = Places({f"EDGELM_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "CACHE", "RUNTIME")})
    settings = Settings(threads=1, ctx=512, engine="torch", device="cpu", memory=False)
    loaded = build(EngineJob(model=path, settings=settings), places=places)
    try:
        LateShortage(64, monkeypatch)
        assert len(asyncio.run(answer(loaded.engine, PROMPTS[0]))) == 6
    finally:
        loaded.engine.close()
    assert "all running requests are computed again" in caplog.text


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 64])
def test_parts_have_the_tokens_and_rows_of_the_step(max_tokens: int) -> None:
    seq = Sequence(0, list(range(40)), 40, SamplingParams())
    chunks = [
        Chunk(seq, 7, [1, 2, 3, 4, 5, 6], 3, (0,)),
        Chunk(seq, 0, [9], 1, (1,)),
        Chunk(seq, 5, [1, 2, 3, 4], 0, (2,)),
    ]

    def cells(step: Step) -> list[tuple[object, ...]]:
        return [
            (chunk.kv, chunk.start + i, token, i >= len(chunk.tokens) - chunk.rows)
            for chunk in step.chunks
            for i, token in enumerate(chunk.tokens)
        ]

    parts = list(parts_of(Step(tuple(chunks)), max_tokens))
    assert [cell for part in parts for cell in cells(part)] == cells(Step(tuple(chunks)))
    assert max(part.num_tokens for part in parts) <= max_tokens


def test_closing_after_a_failure_fails_no_more(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(decoder)
    executor._device = torch.device("cuda")

    def fail() -> None:
        raise cuda("an illegal memory access was encountered")

    for call in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, call, fail)
    executor.close()
