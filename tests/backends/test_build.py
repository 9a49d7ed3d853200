"""The choices before a model is loaded: context, KV cache, engine, and whether the model fits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import edgelm.backends.build as build_package
import edgelm.backends.torch.build as torch_build
from edgelm.backends.build import build, choose, load_evaluation
from edgelm.backends.choice import EngineChoice
from edgelm.backends.llama import build as build_module
from edgelm.backends.model import open_model
from edgelm.backends.reports import Reports
from edgelm.backends.torch import compiling
from edgelm.base.config import Settings
from edgelm.base.errors import (
    CompiledKernelError,
    DeviceError,
    DoesNotFitError,
    EdgeLMError,
    GpuLoadError,
    ModelError,
    OutOfMemoryError,
)
from edgelm.base.machine.gpu import CudaState
from edgelm.base.workers.messages import EngineJob, EvalJob
from edgelm.engine import watchdog
from edgelm.engine.core import ExecutorInfo
from edgelm.models.loading.stored import BLOCK_TYPES
from tests.tiny import write_tiny

MIB = 2**20
POSITION_BYTES = {"f16": 65_536, "k8v16": 50_176, "int8": 34_816, "k8v4": 26_624}
KV_MODES = {size: kv for kv, size in POSITION_BYTES.items()}


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose cache takes 64 KiB a position in f16: 8 layers of 8 heads of 256 numbers, twice."""
    return write_tiny(tmp_path / "wide.gguf", layers=8, heads=8, kv_heads=8, head_dim=256, context=32768)


def built(path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, **settings: object) -> ExecutorInfo:
    monkeypatch.setattr(build_module, "available_memory_bytes", lambda: free_mib * MIB)
    loaded = build(EngineJob(model=path, settings=Settings(**{"threads": 1} | settings)))
    loaded.engine.close()
    return loaded.engine.info


def choice(path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, **settings: object) -> tuple[int, str]:
    info = built(path, monkeypatch, free_mib, **settings)
    return info.context, KV_MODES[info.kv_bytes_per_token]


def test_short_memory_asks_for_a_smaller_cache_and_then_for_less_context(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choice(wide, monkeypatch, 4000) == (8192, "f16")
    assert choice(wide, monkeypatch, 840) == (8192, "k8v16")
    assert choice(wide, monkeypatch, 540) == (8192, "int8")
    assert choice(wide, monkeypatch, 390) == (8192, "k8v4")
    assert choice(wide, monkeypatch, 340) == (4096, "int8")


def test_what_was_chosen_is_kept_or_refused(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(wide, monkeypatch, 4000, ctx=100, kv="k8v4") == (100, "k8v4")
    assert choice(wide, monkeypatch, 800, kv="f16") == (4096, "f16")
    assert choice(wide, monkeypatch, 800, ctx=16_384) == (16_384, "int8")
    with pytest.raises(
        ModelError, match=r"needs 0\.85 GiB of memory with --ctx 8192 --kv f16, 0\.74 GiB are free"
    ) as no:
        built(wide, monkeypatch, 800, ctx=8192, kv="f16")
    assert no.value.hint == "--ctx 8192 --kv k8v16 would fit"
    with pytest.raises(EdgeLMError, match="more than the 32,768"):
        built(wide, monkeypatch, 1000, ctx=32_769)


def test_what_cannot_be_is_refused_before_it_is_loaded(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "LlamaModel", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match="take a smaller model"):
        built(wide, monkeypatch, 50)
    with pytest.raises(ModelError, match="would fit"):
        built(wide, monkeypatch, 800, ctx=32_768, kv="f16")
    odd = write_tiny(tmp_path / "odd.gguf", heads=4, kv_heads=4, head_dim=48)
    with pytest.raises(ModelError, match="--kv int8 needs key heads of a multiple of 32 numbers, this model's have 48"):
        built(odd, monkeypatch, 4000, kv="int8")


def test_heads_that_cannot_be_quantized_get_less_context_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = write_tiny(tmp_path / "odd.gguf", layers=8, heads=16, kv_heads=16, head_dim=80, context=32_768)
    info = built(odd, monkeypatch, 600)
    assert info.kv_bytes_per_token == 8 * 16 * 80 * 2 * 2
    assert info.context == 4096


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_package, "find_cuda", lambda: CudaState("", "", "GPU X", 80 * 2**30, 80 * 2**30))


def chosen(path: Path, **settings: object) -> EngineChoice:
    with open_model(path) as model:
        return choose(model, Settings(**settings))  # type: ignore[arg-type]


@pytest.mark.usefixtures("with_a_gpu")
def test_what_the_kernels_cannot_take_is_llama_cpps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_tiny(tmp_path / "plain.gguf", quant="q8_0")
    unchecked = "its kernels are not checked on this GPU yet: that is done before its first use"
    untuned = "no kernel is tuned for this GPU yet: that is done while the model is loaded"
    assert chosen(plain) == EngineChoice("torch", "cuda", (unchecked,))
    assert chosen(plain, tune=True).reasons == (unchecked, untuned)
    with monkeypatch.context() as tuned:
        tuned.setattr("edgelm.backends.tuned.num_tuned", lambda _folder, gpu: 5 if gpu == "GPU X" else 0)
        assert chosen(plain, tune=True).reasons == (unchecked,)
    odd = write_tiny(tmp_path / "odd.gguf", head_dim=48)
    assert chosen(odd).engine == "llama"
    assert "its heads have 48 numbers" in chosen(odd).reasons[0]
    assert chosen(odd, engine="torch").device == "cpu"  # by the reference ops
    with pytest.raises(EdgeLMError, match="--device cuda: its heads have 48 numbers"):
        chosen(odd, engine="torch", device="cuda")
    monkeypatch.delitem(BLOCK_TYPES, "Q8_0")  # as if it were one of the formats that no kernel reads
    assert chosen(plain).engine == "llama"
    assert "is Q8_0, which the GPU kernels do not support" in chosen(plain).reasons[0]
    with pytest.raises(ModelError, match=r"cannot be run with --engine torch: .*; use --engine llama"):
        chosen(plain, engine="torch")


def test_a_model_without_room_names_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_package, "find_cuda", lambda: CudaState("", "", "GPU X", 2**28, 2**33))
    wide = write_tiny(tmp_path / "wide.gguf", width=512, ffn=2048, layers=8)
    assert chosen(wide).reasons[0].endswith(" GiB are free on GPU X")


@pytest.mark.parametrize("kv", ["fp8", "k6v4"])
def test_a_cache_that_only_another_engine_has_is_refused_with_the_reason(wide: Path, kv: str) -> None:
    with pytest.raises(ModelError, match=rf"--kv {kv} is not among the KV caches of llama\.cpp \(f16, k8v16"):
        build(EngineJob(model=wide, settings=Settings(kv=kv)))


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the torch engine fail while it loads a model."""

    def build_torch(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch_build, "build_torch", build_torch)


LOAD_FAILURES = [
    CompiledKernelError("a compiled kernel cannot be read: KeyError: 'cubin'", "remove Triton's cache"),
    DoesNotFitError("plain does not fit in the memory of the GPU", "take a smaller model"),
    OutOfMemoryError("the memory of the GPU is used up", "lower --ctx"),
    DeviceError("the GPU's kernels cannot be compiled: Failed to find C compiler.", "see `edgelm doctor`"),
    DeviceError("the GPU failed: CUDA error: an illegal memory access was encountered", "try again"),
]


@pytest.mark.usefixtures("with_a_gpu")
@pytest.mark.parametrize("error", LOAD_FAILURES, ids=str)
def test_what_the_gpu_cannot_load_goes_on_without_it_unless_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: EdgeLMError
) -> None:
    plain = write_tiny(tmp_path / "plain.gguf", quant="q8_0")
    failing(monkeypatch, error)
    with pytest.raises(GpuLoadError) as caught:
        build(EngineJob(model=plain, settings=Settings(threads=1)))
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)
    for asked in ({"engine": "torch"}, {"device": "cuda"}):
        with pytest.raises(type(error)) as own:
            build(EngineJob(model=plain, settings=Settings(threads=1, **asked)))  # type: ignore[arg-type]
        assert own.value is error
    again = build(EngineJob(model=plain, settings=Settings(threads=1), cuda_problem=caught.value.message))
    assert again.engine.info.engine == "llama"
    again.engine.close()


@pytest.mark.usefixtures("with_a_gpu")
@pytest.mark.parametrize(("asked", "kind"), [({}, GpuLoadError), ({"engine": "torch"}, DeviceError)])
def test_loading_that_hangs_is_told_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], kind: type[EdgeLMError]
) -> None:
    """Pieces that are reported do not hang, however many there are."""
    told: list[EdgeLMError] = []
    hung = threading.Event()
    seconds = [0.0, 0.0]

    def build_torch(*_: object, reports: Reports, **__: object) -> None:
        began = time.monotonic()
        for _ in range(30):
            reports.loaded(0.5)
            reports.say("compiling")
            time.sleep(0.02)
        seconds[0] = time.monotonic() - began
        assert not hung.is_set()
        assert hung.wait(30)
        seconds[1] = time.monotonic() - began
        raise ModelError("the end of the test")

    def lost(error: EdgeLMError) -> None:
        told.append(error)
        hung.set()

    monkeypatch.setattr(torch_build, "build_torch", build_torch)
    monkeypatch.setattr(watchdog, "GPU_OTHER_S", 0.4)
    monkeypatch.setattr(build_package, "Watchdog", partial(watchdog.Watchdog, tick_s=0.02))
    with pytest.raises(ModelError, match="the end of the test"):
        build(
            EngineJob(model=write_tiny(tmp_path / "plain.gguf", quant="q8_0"), settings=Settings(threads=1, **asked)),
            Reports(when_lost=lost),
        )
    assert seconds[0] > 0.5
    assert seconds[1] - seconds[0] > 0.3
    assert [type(error) for error in told] == [kind]
    assert told[0].message == "the GPU hangs: a piece of loading the model did not end within 0 s"
    assert told[0].hint == "try again; see what nvidia-smi says"


@pytest.mark.parametrize(("asked", "kind"), [({}, GpuLoadError), ({"engine": "torch"}, DeviceError)])
@pytest.mark.parametrize("loads", ["a model", "an evaluation"])
def test_a_gpu_that_hangs_while_cuda_starts_is_told_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], kind: type[EdgeLMError], loads: str
) -> None:
    told: list[EdgeLMError] = []
    hung = threading.Event()

    def find_cuda() -> CudaState:
        hung.wait(10)
        raise ModelError("the end of the test")

    def lost(error: EdgeLMError) -> None:
        told.append(error)
        hung.set()

    monkeypatch.setattr(build_package, "find_cuda", find_cuda)
    monkeypatch.setattr(watchdog, "GPU_OTHER_S", 0.1)
    monkeypatch.setattr(build_package, "Watchdog", partial(watchdog.Watchdog, tick_s=0.02))
    path, reports = write_tiny(tmp_path / "plain.gguf", quant="q8_0"), Reports(when_lost=lost)
    settings = Settings(threads=1, **asked)  # type: ignore[arg-type]
    load: Callable[[], object] = partial(build, EngineJob(model=path, settings=settings), reports)
    if loads == "an evaluation":
        load = partial(load_evaluation, EvalJob(model=path, text=path, kv="f16", settings=settings), reports)
    with pytest.raises(ModelError, match="the end of the test"):
        load()
    assert [type(error) for error in told] == [kind]
    assert told[0].message == "the GPU hangs: the start of CUDA did not end within 0 s"


@pytest.mark.parametrize("without", [{"device": "cpu"}, {"engine": "llama"}, {"problem": "it failed"}], ids=str)
def test_where_cuda_is_not_started_nothing_waits_for_it(
    wide: Path, monkeypatch: pytest.MonkeyPatch, without: dict[str, str]
) -> None:
    monkeypatch.setattr(build_package, "Watchdog", pytest.fail)
    monkeypatch.setattr(build_package, "find_cuda", pytest.fail)
    settings = {name: value for name, value in without.items() if name != "problem"}
    job = EngineJob(model=wide, settings=Settings(threads=1, **settings), cuda_problem=without.get("problem", ""))  # type: ignore[arg-type]
    build(job).engine.close()


def test_a_compiler_that_never_ends_is_no_hang_of_the_gpu() -> None:
    """It has a limit of its own, and its error says more."""
    assert watchdog.GPU_OTHER_S > compiling.LIMIT_S + 10 * watchdog.TICK_S


@pytest.mark.usefixtures("with_a_gpu")
def test_a_damaged_model_is_no_failure_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ModelError("plain is damaged"))
    with pytest.raises(ModelError, match="plain is damaged"):
        build(EngineJob(model=write_tiny(tmp_path / "plain.gguf", quant="q8_0"), settings=Settings(threads=1)))


@pytest.mark.usefixtures("with_a_gpu")
def test_why_cuda_is_not_used_any_more_is_told(tmp_path: Path) -> None:
    with open_model(write_tiny(tmp_path / "plain.gguf", quant="q8_0")) as model:
        choice = choose(model, Settings(), cuda_problem="the memory of the GPU is used up")
    assert choice.engine == "llama"
    assert choice.reasons[0] == "our own kernels are not used: the memory of the GPU is used up"
