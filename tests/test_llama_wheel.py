"""The cache of llama.cpp wheels: used again only where it is safe, and never in part."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "packaging" / "llama_wheel.py"
WHEEL = "llama_cpp_python-0.3.36-py3-none-any.whl"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_wheel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["llama_wheel"] = module
    spec.loader.exec_module(module)
    return module


llama_wheel = load_script()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the minutes of compiling by a file; return where each build took place."""
    places: list[Path] = []

    def build_wheel(build: Any, scratch: Path) -> Path:
        places.append(scratch)
        with zipfile.ZipFile(scratch / WHEEL, "w") as archive:
            archive.writestr("llama_cpp/lib/libllama.so", os.urandom(10_000))
        return scratch / WHEEL

    monkeypatch.setattr(llama_wheel, "build_wheel", build_wheel)
    return places


@pytest.fixture
def build() -> Any:
    return llama_wheel.Build("llama-cpp-python>=0.3.36,<0.3.37", {"CFLAGS": "-O2"}, "#define __AVX2__ 1")


def test_a_wheel_is_built_once(build: Any, builds: list[Path], tmp_path: Path) -> None:
    first = llama_wheel.ensure_wheel(build, tmp_path)
    assert llama_wheel.ensure_wheel(build, tmp_path) == first
    assert len(builds) == 1
    assert [path.name for path in tmp_path.iterdir()] == [build.key]  # nothing is left of the build


@pytest.mark.parametrize(
    "change",
    [
        {"requirement": "llama-cpp-python>=0.3.37,<0.3.38"},
        {"environment": {"CFLAGS": "-O3"}},
        {"environment": {"CFLAGS": "-O2", "CMAKE_ARGS": "-DGGML_NATIVE=OFF"}},
        {"target": "#define __AVX512F__ 1"},
    ],
)
def test_another_build_has_another_wheel(
    change: dict[str, Any], build: Any, builds: list[Path], tmp_path: Path
) -> None:
    first = llama_wheel.ensure_wheel(build, tmp_path)
    assert llama_wheel.ensure_wheel(replace(build, **change), tmp_path) != first
    assert len(builds) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "folder of nothing"])
def test_a_damaged_wheel_is_built_again(damage: str, build: Any, builds: list[Path], tmp_path: Path) -> None:
    wheel = llama_wheel.ensure_wheel(build, tmp_path)
    data = bytearray(wheel.read_bytes())
    if damage == "empty":
        data.clear()
    elif damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flipped":
        data[5_000] ^= 1
    wheel.write_bytes(data)
    if damage == "folder of nothing":
        wheel.unlink()
    assert llama_wheel.is_whole(llama_wheel.ensure_wheel(build, tmp_path))
    assert len(builds) == 2


def test_builds_at_the_same_time_leave_one_whole_wheel(build: Any, builds: list[Path], tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        wheels = set(pool.map(lambda _: llama_wheel.ensure_wheel(build, tmp_path), range(16)))
    (wheel,) = wheels
    assert llama_wheel.is_whole(wheel)
    assert len(set(builds)) == len(builds)
    assert [path.name for path in tmp_path.iterdir()] == [build.key]


def test_the_cache_lies_where_the_environment_says(tmp_path: Path) -> None:
    assert llama_wheel.cache_folder({"EDGELM_WHEEL_CACHE": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert llama_wheel.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/edgelm-wheels")
    assert llama_wheel.cache_folder({}) == Path.home() / ".cache" / "edgelm-wheels"


def test_cmake_leaves_parts_out_and_corrects_the_source(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files: list[str] = []

    def compile_it(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        own, included = shlex.split(env["CMAKE_ARGS"])
        assert own == "-DGGML_NATIVE=OFF"
        name, _, path = included.partition("=")
        assert name == "-DCMAKE_PROJECT_llama_cpp_INCLUDE"
        files.append(Path(path).read_text())
        with zipfile.ZipFile(Path(path).parent / WHEEL, "w") as archive:
            archive.writestr("llama_cpp/lib/libllama.so", b"library")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(llama_wheel.subprocess, "run", compile_it)
    folder = tmp_path / "a folder"
    folder.mkdir()
    llama_wheel.ensure_wheel(replace(build, environment={"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}), folder)
    (text,) = files
    assert text.startswith(llama_wheel.LEFT_OUT)
    assert str(llama_wheel.SOURCE) in text
    keys = [build.key]
    monkeypatch.setattr(llama_wheel, "LEFT_OUT", "")
    keys.append(build.key)
    changed = tmp_path / "llama_source.py"
    changed.write_text("another correction")
    monkeypatch.setattr(llama_wheel, "SOURCE", changed)
    keys.append(build.key)
    assert len(set(keys)) == 3


@pytest.mark.skipif(not shutil.which("cmake"), reason="without cmake")
def test_a_source_that_cannot_be_corrected_is_not_compiled(
    build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the real CMake, in a folder with a space."""
    results: list[subprocess.CompletedProcess[str]] = []
    run = subprocess.run
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.21)\nproject(llama_cpp NONE)\n")

    def configure(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        (included,) = shlex.split(env["CMAKE_ARGS"])
        results.append(
            run(["cmake", "-S", source, "-B", tmp_path / "b", included], capture_output=True, text=True, check=False)
        )
        return subprocess.CompletedProcess(command, 1)

    script = tmp_path / "a folder" / "llama_source.py"
    script.parent.mkdir()
    monkeypatch.setattr(llama_wheel, "SOURCE", script)
    monkeypatch.setattr(llama_wheel.subprocess, "run", configure)
    for text in ("import sys; print('at', sys.argv[1])", "import sys; sys.exit('another source')"):
        script.write_text(text)
        scratch = tmp_path / f"scratch {len(results)}"
        scratch.mkdir()
        with pytest.raises(llama_wheel.BuildError):
            llama_wheel.build_wheel(replace(build, environment={}), scratch)
    assert results[0].returncode == 0
    assert f"at {source}" in results[0].stdout
    assert results[1].returncode != 0
    assert "another source" in results[1].stderr


def test_without_a_compiler_it_says_so_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"CC": str(tmp_path / "missing"), "EDGELM_WHEEL_CACHE": str(tmp_path)}
    result = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: no C compiler: ")


def test_a_failed_build_shows_its_output_and_leaves_nothing(
    build: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(build, requirement=str(tmp_path / "no-such-project"))
    with pytest.raises(llama_wheel.BuildError, match="not built"):
        llama_wheel.ensure_wheel(wrong, tmp_path)
    assert "no-such-project" in capfd.readouterr().err
    assert list(tmp_path.rglob("*.whl")) == []
    assert [path.name for path in tmp_path.iterdir()] == [wrong.key]
