"""find_cuda on machines without a driver, packages or a usable GPU. The GPU itself is mocked."""

from __future__ import annotations

import os
import subprocess
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from edgelm.backends.questions import ask_cuda
from edgelm.base.machine import cuda
from edgelm.base.machine.cuda import find_cuda, gpu_memory
from edgelm.base.machine.gpu import CudaState, Gpu, StandingGpu
from edgelm.base.places import Places


@pytest.fixture
def driver(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "nvidiactl"
    path.touch()
    return (str(path),)


def mock_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7, 9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1a2b"))


def test_without_a_driver_no_package_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", pytest.fail)
    assert "no NVIDIA GPU" in find_cuda(("/nowhere/nvidiactl",)).problem


def test_a_gpu_that_its_tool_lists_is_looked_at_whatever_its_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "standing_gpu", lambda: StandingGpu("Orin"))
    monkeypatch.setattr(cuda, "find_spec", lambda _: None)
    assert find_cuda(("/nowhere/nvidiactl",)).problem == "torch is not installed"


def test_where_no_driver_works_the_hint_is_that_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = StandingGpu("the NVIDIA GPU", "this container was started without it", "start it with --gpus all")
    monkeypatch.setattr(cuda, "standing_gpu", lambda: card)
    assert find_cuda(("/nowhere/nvidiactl",)) == CudaState(card.problem, card.hint)
    monkeypatch.setattr(cuda, "standing_gpu", lambda: StandingGpu("the AMD GPU", "it is AMD's", backend="vulkan"))
    assert find_cuda(("/nowhere/nvidiactl",)) == CudaState("no NVIDIA GPU was found")


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_a_missing_package_is_named(driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None if name == missing else object())
    state = find_cuda(driver)
    assert state.problem == f"{missing} is not installed"
    assert "edgelm[cuda]" in state.hint


@pytest.mark.parametrize(("version", "fine"), [("3.5.1", False), ("3.6.0", True), ("3.9.2", True), ("3.10.0", False)])
def test_only_known_versions_of_triton(
    driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, version: str, fine: bool
) -> None:
    mock_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(cuda, "version", lambda _: version)
    assert (find_cuda(driver).problem == "") is fine


def test_versions_of_triton_that_the_extra_does_not_bring_are_told_once(
    driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    extra = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]["cuda"]
    taken = next(Requirement(line).specifier for line in extra if line.startswith("triton"))
    mock_gpu(monkeypatch, (9, 0))
    cuda._note_triton.cache_clear()
    for triton in ("3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0"):
        caplog.clear()
        monkeypatch.setattr(cuda, "version", lambda _, found=triton: found)
        assert [find_cuda(driver).problem for _ in range(2)] == ["", ""]
        assert len(caplog.records) == (triton not in taken)


@pytest.mark.parametrize(("capability", "fine"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_only_gpus_from_ampere_on(
    driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fine: bool
) -> None:
    mock_gpu(monkeypatch, capability)
    state = find_cuda(driver)
    assert (state.problem == "") is fine
    assert (state.name, state.free_bytes, state.total_bytes) == ("GPU X", 7, 9)
    assert state.uuid == ("1a2b" if fine else "")


@pytest.mark.parametrize(("integrated", "available", "free"), [(0, 8, 7), (1, 8, 8), (1, 5, 7), (1, 12, 9)])
def test_of_memory_that_a_gpu_shares_the_page_cache_is_free(
    driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, integrated: int, available: int, free: int
) -> None:
    """CUDA says that 7 of 9 bytes are free."""
    mock_gpu(monkeypatch, (12, 1))
    properties = SimpleNamespace(uuid="1a2b", is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(cuda, "available_memory_bytes", lambda: available)
    assert (find_cuda(driver).free_bytes, gpu_memory()) == (free, (free, 9))


def test_this_build_of_torch(driver: tuple[str, ...]) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for CUDA")
    state = find_cuda(driver)
    assert state.problem == "this build of torch has no CUDA"
    assert state.hint.startswith("uninstall torch, then type: ")  # pip takes it for the right one


def test_the_driver_starts_without_the_lock_of_python_and_sees_the_order_of_gpus(
    driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch holds the lock while it starts CUDA, and a watchdog of this process could not run."""
    events: list[str] = []

    def start(_: int) -> int:
        events.append(f"started with {os.environ['CUDA_VISIBLE_DEVICES']}")
        return 999  # it fails: torch says why

    mock_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: events.append("torch looks") or True)
    monkeypatch.setattr(cuda, "_name_the_freest_first", lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b"))
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(cuInit=start) if name == "libcuda.so.1" else None)
    assert find_cuda(driver).problem == ""
    assert events == ["started with GPU-b", "torch looks"]


def test_a_gpu_that_does_not_answer(driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("CUDA driver error: unknown\nmore lines")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", fail)
    state = find_cuda(driver)
    assert state.problem == "the GPU does not answer: CUDA driver error: unknown"


TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update your "
    "GPU driver by downloading and installing a new version. (Triggered internally at c10/cuda/CUDAFunctions.cpp:119.)"
)
MUCH_TOO_OLD = TOO_OLD.replace("12040", "11040")
NOT_SET_UP = (
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
    "variable CUDA_VISIBLE_DEVICES after program start. (Triggered internally at c10/cuda/CUDAFunctions.cpp:109.)"
)


@pytest.mark.parametrize(
    ("warning", "problem", "hint"),
    [
        (
            TOO_OLD,
            "the NVIDIA driver is for CUDA 12.4, too old for torch ",
            "update the driver to 580 or newer, or use llama.cpp on the GPU (edgelm-llama-cuda)",
        ),
        (
            MUCH_TOO_OLD,
            "the NVIDIA driver is for CUDA 11.4, too old for torch ",
            "update the driver to 580 or newer, or use llama.cpp on the GPU (edgelm-llama-vulkan)",
        ),
        (NOT_SET_UP, "torch finds no usable GPU: CUDA unknown error - this may be due to", "restart the machine"),
        ("", "torch finds no usable GPU", "see what nvidia-smi says"),
    ],
    ids=["too old", "much too old", "not set up", "no GPU"],
)
def test_a_driver_that_torch_cannot_use(
    driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, warning: str, problem: str, hint: str
) -> None:
    """torch raises nothing then: it says so in a warning, and that there is no GPU."""

    def warns() -> bool:
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", warns)
    monkeypatch.setattr(cuda, "gpu_backend_command", lambda _, backend: f"edgelm-llama-{backend}")
    state = find_cuda(driver)
    assert state.problem.startswith(problem)
    assert state.hint.startswith(hint)
    assert ("torch==2.10" in state.hint) is (warning == TOO_OLD)  # it needs a driver for CUDA 12


def test_a_process_without_torch_can_ask() -> None:
    assert ask_cuda().problem == find_cuda().problem


@pytest.mark.parametrize(
    ("gpus", "visible", "order"),
    [
        (["A 5 GPU-1", "A 9 GPU-2"], None, "GPU-2,GPU-1"),
        (["A 9 GPU-1", "A 5 GPU-2"], None, "GPU-1,GPU-2"),
        (["A 5 GPU-1", "B 9 GPU-2"], None, None),  # CUDA's own first is the faster one
        (["A 4 GPU-1", "B 9 GPU-2"], None, "GPU-2,GPU-1"),
        (["A 9 GPU-1", "B 4 GPU-2"], None, "GPU-1,GPU-2"),
        (["A 4 GPU-1", "B 20 GPU-old"], None, "GPU-1,GPU-old"),
        (["A 9 GPU-1", "B 20 GPU-old", "B 4 GPU-2"], None, "GPU-1,GPU-2,GPU-old"),
        (["A 4 GPU-other", "B 20 GPU-old"], None, None),  # how old they are is not known
        (["A 5 GPU-1", "A 9 GPU-2"], "1", "1"),
        (["A 5 GPU-1", "A 9 "], None, None),
        (["A 5 GPU-1"], None, None),
        ([], None, None),
    ],
)
def test_of_two_gpus_the_freer_one_is_the_first(
    driver: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, gpus: list[str], visible: str | None, order: str | None
) -> None:
    def parsed(line: str) -> Gpu:
        name, free, uuid = line.split(" ")
        return Gpu(name, 10, int(free), "580", uuid)

    mock_gpu(monkeypatch, (8, 6))
    monkeypatch.setattr(cuda, "context_bytes", lambda: 0)
    monkeypatch.setattr(cuda, "nvidia_gpus", lambda: [parsed(line) for line in gpus])
    capabilities = {"GPU-1": (8, 6), "GPU-2": (8, 9), "GPU-old": (7, 5)}
    monkeypatch.setattr(cuda, "compute_capabilities", lambda: capabilities)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # so that it is as before after this test
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert not find_cuda(driver).problem
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == order


def test_where_there_is_no_c_compiler_that_of_ziglang_is_taken(
    driver: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton starts the program in CC."""
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (package / "__init__.py").touch()
    mock_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(cuda, "own_places", lambda: Places({"EDGELM_CACHE_DIR": str(tmp_path / "a cache")}))
    monkeypatch.setattr(cuda.shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv("CC", "cc")
    find_cuda(driver)
    assert os.environ["CC"] == "cc"
    monkeypatch.delenv("CC")
    find_cuda(driver)
    assert "CC" not in os.environ, "ziglang is not installed"
    monkeypatch.syspath_prepend(tmp_path)
    find_cuda(driver)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [os.environ["CC"], "a b.c", "-O3"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['cc', 'a b.c', '-O3']\n"
