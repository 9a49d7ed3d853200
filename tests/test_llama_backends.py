"""Of the CPU variants in our wheel, the best that this processor can run is loaded, by its absolute path."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm import llama_binding
from edgelm.errors import EngineError

SCORES = {"x64": 1, "haswell": 40, "zen4": 700, "sapphirerapids": 0}


class Library:
    """llama.cpp's library: remembers which backends were loaded; some cannot be."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.loaded: list[Path] = []

    def ggml_backend_load(self, path: bytes) -> int | None:
        if self.broken and self.broken in path.decode():
            return None
        self.loaded.append(Path(path.decode()))
        return 1


class Settable:
    """A function of a ctypes library, whose types can be set."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


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
    native = SimpleNamespace(ggml_backend_load=Settable(library.ggml_backend_load))
    return llama_binding._load_backends(SimpleNamespace(_lib=native, llama_log_set=lambda *_: None), folder)


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


def test_gpu_backends_are_loaded_from_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "edgelm_llama_vulkan"
    vulkan = package / "lib" / "libggml-vulkan.so"
    vulkan.parent.mkdir(parents=True)
    vulkan.touch()
    (folder / "libggml-metal.so").touch()
    (folder / "libggml-cuda.so").touch()
    monkeypatch.setattr(llama_binding, "package_folder", {"edgelm_llama_vulkan": package}.get)
    library = Library()
    load(folder, library)
    assert library.loaded == [folder / "libggml-cpu-zen4.so", folder / "libggml-metal.so", vulkan]


def test_a_gpu_backend_without_a_driver_is_no_error(folder: Path) -> None:
    (folder / "libggml-metal.so").touch()
    assert load(folder, Library(broken="metal")).name == "libggml-cpu-zen4.so"
