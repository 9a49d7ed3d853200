"""Of the CPU variants in our wheel, the best that this processor can run is loaded, by its absolute path."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.backends.llama import binding as llama_binding
from edgelm.base.errors import EngineError
from edgelm.base.machine import llama_build
from edgelm.base.machine.gpu import StandingGpu
from edgelm.base.machine.llama_build import InstalledLlama

SCORES = {"x64": 1, "haswell": 40, "zen4": 700, "sapphirerapids": 0}


class Library:
    """llama.cpp's library: remembers which backends were loaded; some cannot be, or find no device."""

    def __init__(self, broken: str = "", num_gpus: int = 1, log: bytes = b"") -> None:
        self.broken = broken
        self.num_gpus = num_gpus
        self.log = log  # the line that it writes when it loads a backend
        self.set_log: Any = None
        self.loaded: list[Path] = []

    def llama_log_set(self, callback: Any, _data: None) -> None:
        self.set_log = callback

    def ggml_backend_load(self, path: bytes) -> int | None:
        if self.broken and self.broken in path.decode():
            return None
        self.loaded.append(Path(path.decode()))
        self.set_log(4, self.log, None)
        return 1


class Settable:
    """A function of a ctypes library, whose types can be set."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_binding, "standing_gpu", lambda: None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in SCORES:
        (tmp_path / f"libggml-cpu-{name}.so").touch()

    def open_library(path: str) -> SimpleNamespace:
        name = Path(path).stem.removeprefix("libggml-cpu-")
        return SimpleNamespace(ggml_backend_score=lambda: SCORES[name])

    monkeypatch.setattr(llama_binding.ctypes, "CDLL", open_library)
    return tmp_path


def load(folder: Path, library: Library) -> Path:
    return load_all(folder, library)[0]


def load_all(folder: Path, library: Library) -> tuple[Path, str]:
    native = SimpleNamespace(
        ggml_backend_load=Settable(library.ggml_backend_load),
        ggml_backend_reg_dev_count=Settable(lambda _: library.num_gpus),
    )
    build = InstalledLlama("edgelm-llama", "0.3.36.1", folder)
    return llama_binding._load_backends(SimpleNamespace(_lib=native, llama_log_set=library.llama_log_set), build)


def test_the_best_variant_is_loaded_and_then_the_next(folder: Path) -> None:
    chosen = []
    for _ in range(3):
        library = Library()
        path = load(folder, library)
        assert library.loaded == [path]
        assert path.is_absolute()
        chosen.append(path.stem.removeprefix("libggml-cpu-"))
        path.unlink()
    assert chosen == ["zen4", "haswell", "x64"]
    with pytest.raises(EngineError, match="no kernels for this processor"):
        load(folder, Library())


def test_a_variant_that_cannot_be_loaded_is_passed_over(folder: Path) -> None:
    assert load(folder, Library(broken="zen4")).name == "libggml-cpu-haswell.so"


@pytest.fixture
def wheels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Our wheels for GPUs, installed in the version of edgelm-llama: the library of each backend."""
    libraries = {}
    for backend in ("vulkan", "cuda"):
        libraries[backend] = folder / f"edgelm_llama_{backend}" / "lib" / f"libggml-{backend}.so"
        libraries[backend].parent.mkdir(parents=True)
        libraries[backend].touch()
    monkeypatch.setattr(
        llama_build, "package_folder", {path.parts[-3]: path.parents[1] for path in libraries.values()}.get
    )
    monkeypatch.setattr(llama_build, "version", lambda _: "0.3.36.1")
    return libraries


def test_gpu_backends_are_loaded_from_packages_and_cuda_first(folder: Path, wheels: dict[str, Path]) -> None:
    """A GPU that both know is that of CUDA: it is listed once, by the first."""
    (folder / "libggml-metal.so").touch()
    (folder / "libggml-cuda.so").touch()
    library = Library()
    assert load_all(folder, library) == (folder / "libggml-cpu-zen4.so", "")
    assert library.loaded == [
        folder / "libggml-cpu-zen4.so",
        folder / "libggml-metal.so",
        wheels["cuda"],
        wheels["vulkan"],
    ]


@pytest.mark.parametrize("version", ["0.3.36.2", "0.3.37.1", "unknown"])
def test_a_gpu_backend_of_another_build_is_not_loaded_and_one_line_says_why(
    folder: Path, wheels: dict[str, Path], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(llama_build, "version", lambda _: version)
    library = Library()
    path, problem = load_all(folder, library)
    assert library.loaded == [path]
    assert problem == (
        f"edgelm-llama-cuda {version} is not used, for edgelm-llama is 0.3.36.1; reinstall 'edgelm[llama-cuda]'. "
        f"edgelm-llama-vulkan {version} is not used, for edgelm-llama is 0.3.36.1; reinstall 'edgelm[vulkan]'"
    )


@pytest.mark.parametrize(
    ("backend", "missing", "hint"),
    [
        ("vulkan", "libvulkan.so.1", "install your GPU's driver for Vulkan"),
        ("cuda", "libcuda.so.1", "install or update NVIDIA's driver"),
        ("cuda", "libcublas.so.12", "reinstall 'edgelm[llama-cuda]'"),
    ],
)
def test_a_gpu_backend_that_cannot_be_loaded_says_what_is_missing(
    folder: Path, wheels: dict[str, Path], monkeypatch: pytest.MonkeyPatch, backend: str, missing: str, hint: str
) -> None:
    def open_library(path: str) -> SimpleNamespace:
        if path == str(wheels[backend]):
            raise OSError(f"{missing}: cannot open shared object file")
        return SimpleNamespace(ggml_backend_score=lambda: 1)

    monkeypatch.setattr(llama_binding.ctypes, "CDLL", open_library)
    _, problem = load_all(folder, Library(broken=f"libggml-{backend}"))
    assert problem.startswith(
        f"edgelm-llama-{backend} cannot be loaded: {missing}: cannot open shared object file; {hint}"
    )


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            b"ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected\n",
            " (no CUDA-capable device is detected)",
        ),
        (b"register_backend: registered backend CUDA (0 devices)\n", ""),
    ],
)
def test_a_gpu_backend_without_a_gpu_gives_the_drivers_reason(
    folder: Path, wheels: dict[str, Path], log: bytes, reason: str
) -> None:
    _, problem = load_all(folder, Library(num_gpus=0, log=log))
    assert problem.split(". ")[0] == (
        f"edgelm-llama-cuda finds no GPU{reason}; install or update NVIDIA's driver "
        "(525 or newer for CUDA 12, 580 for CUDA 13)"
    )


@pytest.mark.parametrize(
    ("package", "missing", "hint"),
    [
        (
            "llama-cpp-python",
            "libgomp.so.1",
            "install libgomp.so.1 (Debian, Ubuntu: libgomp1), or uninstall llama-cpp-python",
        ),
        ("edgelm-llama", "libstdc++.so.6", "install libstdc++.so.6 (Debian, Ubuntu: libstdc++6)"),
        ("llama-cpp-python", "libcudart.so.13", "install libcudart.so.13, or uninstall llama-cpp-python"),
        ("llama-cpp-python", "libcuda.so.1", f"{llama_binding._DRIVERS['cuda']}, or uninstall llama-cpp-python"),
    ],
)
def test_a_library_that_the_system_lacks_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, missing: str, hint: str
) -> None:
    reason = f"Failed to load shared library '/x/libllama.so': {missing}: cannot open shared object file: No such file"

    def import_module(_: str) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(llama_binding, "import_module", import_module)
    with pytest.raises(EngineError, match=r"^llama\.cpp cannot be loaded") as caught:
        llama_binding._load(InstalledLlama(package, "0.3.36", tmp_path))
    assert caught.value.hint == hint


def test_a_damaged_library_is_installed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def import_module(_: str) -> None:
        raise OSError("/x/libllama.so: file too short")

    monkeypatch.setattr(llama_binding, "import_module", import_module)
    with pytest.raises(EngineError, match="file too short; reinstall edgelm"):
        llama_binding._load(InstalledLlama("edgelm-llama", "0.3.36", tmp_path))


def test_a_gpu_backend_without_a_driver_is_no_error(folder: Path) -> None:
    (folder / "libggml-metal.so").touch()
    assert load(folder, Library(broken="metal")).name == "libggml-cpu-zen4.so"


REASON = "CUDA driver version is insufficient for CUDA runtime version"
TOO_OLD = f"ggml_cuda_init: failed to initialize CUDA: {REASON}\n".encode()
NONE_FOUND = f"llama-cpp-python 0.3.36 with CUDA finds no GPU ({REASON})"


@pytest.mark.parametrize(
    ("name", "num_gpus", "card", "problem"),
    [
        (
            "libggml-cuda.so",
            0,
            None,
            f"{NONE_FOUND}; install or update NVIDIA's driver (525 or newer for CUDA 12, 580 for CUDA 13)",
        ),
        (
            "libggml-cuda.so",
            0,
            StandingGpu("the NVIDIA GPU", "this container was started without it", "start it with --gpus all"),
            f"{NONE_FOUND}; start it with --gpus all",
        ),
        ("libggml-cuda.so", 2, None, ""),
        ("libggml-blas.so", 0, None, ""),
    ],
    ids=["too old a driver", "a container", "two GPUs", "no backend for GPUs"],
)
def test_somebodys_build_for_gpus_says_why_it_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_gpus: int, card: StandingGpu | None, problem: str
) -> None:
    (tmp_path / name).touch()
    library = Library(num_gpus=num_gpus)

    def start(_: bytes) -> int:
        library.set_log(4, TOO_OLD if num_gpus == 0 else b"ggml_cuda_init: found 2 CUDA devices\n", None)
        return 1

    native = SimpleNamespace(
        ggml_backend_reg_by_name=Settable(start), ggml_backend_reg_dev_count=Settable(lambda _: library.num_gpus)
    )
    binding = SimpleNamespace(_lib=native, llama_log_set=library.llama_log_set)
    monkeypatch.setattr(llama_binding, "import_module", lambda _: binding)
    monkeypatch.setattr(llama_binding, "standing_gpu", lambda: card)
    monkeypatch.setattr(llama_build, "package_folder", lambda _: None)
    assert llama_binding._load(InstalledLlama("llama-cpp-python", "0.3.36", tmp_path))[2] == problem
