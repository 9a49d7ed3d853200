"""Which build of llama.cpp is used, and that it is the one that the binding was made for."""

from __future__ import annotations

import ctypes
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgelm.backends.llama.binding import layout_difference
from edgelm.base.errors import EngineError
from edgelm.base.machine import llama_build
from edgelm.base.machine.llama_build import GPU_WHEELS, SUPPORTED, GpuWheel, find_build, gpu_library

PROJECT = Path(__file__).resolve().parents[3] / "packaging" / "llama" / "pyproject.toml"


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, **packages: str) -> None:
    """Let these packages be installed, in these versions."""

    def find_spec(name: str) -> SimpleNamespace | None:
        return SimpleNamespace(origin=str(folder / name / "__init__.py")) if name in packages else None

    def version(distribution: str) -> str:
        return packages["llama_cpp" if distribution == "llama-cpp-python" else distribution.replace("-", "_")]

    monkeypatch.setattr(llama_build, "find_spec", find_spec)
    monkeypatch.setattr(llama_build, "version", version)


def test_our_wheel_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, edgelm_llama="0.3.36.1")
    build = find_build()
    assert build.ready_made
    assert build.lib_dir == tmp_path / "edgelm_llama" / "lib"


@pytest.mark.parametrize("version", [SUPPORTED, f"{SUPPORTED}+cuda"])
def test_a_build_of_this_machine_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    install(monkeypatch, tmp_path, edgelm_llama="0.3.36.1", llama_cpp=version)
    assert find_build().lib_dir == tmp_path / "llama_cpp" / "lib"


@pytest.mark.parametrize(
    ("tag", "libraries", "label"),
    [
        ("py3-none-linux_x86_64", ("base.so", "cpu.so"), "(linux_x86_64, with cpu)"),
        ("py3-none-manylinux_2_17_x86_64", ("base.so", "cpu.so", "cuda.so"), "(manylinux_2_17_x86_64, with cpu, cuda)"),
        ("py3-none-macosx_11_0_arm64", ("metal.dylib", "cpu-apple_m1.so"), "(macosx_11_0_arm64, with cpu, metal)"),
        ("", (), "()"),
    ],
)
def test_the_label_tells_builds_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tag: str, libraries: tuple[str, ...], label: str
) -> None:
    install(monkeypatch, tmp_path, llama_cpp=SUPPORTED)
    text = f"Wheel-Version: 1.0\nTag: {tag}\n" if tag else ""
    monkeypatch.setattr(llama_build, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    build = find_build()
    build.lib_dir.mkdir(parents=True)
    for name in libraries:
        (build.lib_dir / f"libggml-{name}").touch()
    assert build.label == f"llama-cpp-python {SUPPORTED} {label}"


@pytest.mark.parametrize("wheel", GPU_WHEELS, ids=lambda wheel: wheel.backend)
def test_a_wheel_for_gpus_belongs_to_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: GpuWheel) -> None:
    name = wheel.package.replace("-", "_")
    install(monkeypatch, tmp_path, edgelm_llama="0.3.36.1")
    assert gpu_library(wheel, find_build()) is None
    install(monkeypatch, tmp_path, edgelm_llama="0.3.36.1", **{name: "0.3.36.1"})
    assert gpu_library(wheel, find_build()) == tmp_path / name / "lib" / f"libggml-{wheel.backend}.so"
    install(monkeypatch, tmp_path, edgelm_llama="0.3.36.2", **{name: "0.3.36.1"})
    with pytest.raises(
        EngineError, match=rf"{wheel.package} 0\.3\.36\.1 is not used, for edgelm-llama is 0\.3\.36\.2"
    ) as caught:
        gpu_library(wheel, find_build())
    assert caught.value.hint == f"reinstall 'edgelm[{wheel.extra}]'"
    install(monkeypatch, tmp_path, edgelm_llama="0.3.36.1", llama_cpp=SUPPORTED, **{name: "0.3.36.1"})
    with pytest.raises(EngineError, match="is not used beside llama-cpp-python, which has backends"):
        gpu_library(wheel, find_build())


def test_another_release_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, edgelm_llama="0.3.36.1", llama_cpp="0.3.40")
    assert find_build().ready_made
    install(monkeypatch, tmp_path, llama_cpp="0.3.40")
    with pytest.raises(
        EngineError, match=rf"edgelm works with llama-cpp-python {SUPPORTED}, and 0\.3\.40 is installed"
    ):
        find_build()


def test_no_build_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    with pytest.raises(EngineError, match="not installed"):
        find_build()


def test_the_releases_agree() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert project["version"].startswith(f"{SUPPORTED}.")
    assert project["dependencies"][0].startswith(f"llama-cpp-python>={SUPPORTED},")


class Params(ctypes.Structure):
    _fields_ = (("flag", ctypes.c_bool), ("count", ctypes.c_int32))


class Entry(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("size", ctypes.c_size_t))


RIGHT = [(b"params", 0, 8), (b"params.flag", 0, 1), (b"params.count", 4, 4)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (RIGHT, ""),
        ([(b"params", 0, 16), *RIGHT[1:]], "params: offset and size are (0, 8), not (0, 16)"),
        ([*RIGHT[:2], (b"params.count", 8, 4)], "params.count: offset and size are (4, 4), not (8, 4)"),
        ([*RIGHT, (b"params.more", 8, 4)], "the binding has no params.more"),
        ([(b"batch", 0, 8)], "the binding has no batch"),
    ],
)
def test_a_difference_of_the_layouts_is_found(entries: list[tuple[bytes, int, int]], message: str) -> None:
    table = (Entry * (len(entries) + 1))(*(Entry(*entry) for entry in entries))
    assert layout_difference(SimpleNamespace(params=Params), table) == message


@pytest.mark.parametrize(
    ("packages", "files", "has"),
    [
        ({"edgelm_llama": "0.3.36.1"}, ["libggml-cpu-haswell.so"], False),
        ({"edgelm_llama": "0.3.36.1", "edgelm_llama_cuda": "0.3.36.1"}, [], True),
        ({"llama_cpp": SUPPORTED}, ["libggml-cuda.so", "libggml-cpu.so"], True),
        ({}, [], False),
    ],
)
def test_a_backend_for_gpus_is_seen_without_loading_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packages: dict[str, str], files: list[str], has: bool
) -> None:
    install(monkeypatch, tmp_path, **packages)
    for package in packages:
        (tmp_path / package / "lib").mkdir(parents=True)
        for file in files:
            (tmp_path / package / "lib" / file).touch()
    assert llama_build.has_gpu_backend() is has


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("/home/me/.local/share/pipx/venvs/edgelm", "type: pipx runpip edgelm install 'edgelm[cuda]'"),
        (
            "/home/me/.local/share/uv/tools/edgelm",
            "type: uv pip install --python /home/me/.local/share/uv/tools/edgelm/bin/python 'edgelm[cuda]'",
        ),
        ("/srv/venv", "type: /srv/venv/bin/python -m pip install 'edgelm[cuda]'"),
    ],
)
def test_an_extra_is_added_to_the_installation_that_is_there(prefix: str, command: str) -> None:
    assert llama_build.extra_command("cuda", Path(prefix)) == command


def test_a_tool_that_keeps_its_environments_elsewhere_is_known_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "pipx_metadata.json").touch()
    assert llama_build.extra_command("cuda", tmp_path) == "type: pipx runpip edgelm install 'edgelm[cuda]'"
    assert llama_build.install_command("ziglang", tmp_path) == "type: pipx inject edgelm ziglang"
    torch = llama_build.install_command("torch==2.10.*", tmp_path, other_release=True)
    assert torch == "type: pipx runpip edgelm install 'torch==2.10.*'", "inject leaves alone what is there"


RECEIPT = """[tool]
requirements = [{ name = "edgelm", extras = ["cuda"], specifier = ">=0.6" }, { name = "ziglang" }, { name = "torch" }]
entrypoints = [{ name = "edgelm", install-path = "/home/me/.local/bin/edgelm" }]
"""


@pytest.mark.parametrize(
    ("receipt", "requirement", "command"),
    [
        (
            RECEIPT,
            "edgelm-llama-cuda",
            "uv tool install 'edgelm[cuda]>=0.6' --with ziglang --with torch --with edgelm-llama-cuda",
        ),
        (RECEIPT, "torch==2.10.*", "uv tool install 'edgelm[cuda]>=0.6' --with ziglang --with 'torch==2.10.*'"),
        (RECEIPT, "edgelm[vulkan]", "uv tool install 'edgelm[cuda,vulkan]>=0.6' --with ziglang --with torch"),
        ('[tool]\nrequirements = [{ name = "edgelm" }]', "edgelm[cuda]", "uv tool install 'edgelm[cuda]'"),
        ('[tool]\nrequirements = [{ name = "edgelm" }]', "ziglang", "uv tool install edgelm --with ziglang"),
        ('[tool]\nrequirements = [{ name = "edgelm", directory = "/src" }]', "ziglang", ""),
        (RECEIPT + '[tool.options]\nfind-links = ["dist"]\n', "ziglang", ""),
        ("", "ziglang", ""),
        ("[tool", "ziglang", ""),
        ("[tool]\nrequirements = 5", "ziglang", ""),
    ],
)
def test_uv_keeps_what_is_there_only_if_it_is_named(
    receipt: str, requirement: str, command: str, tmp_path: Path
) -> None:
    """`uv tool install edgelm --with A` removes what an earlier `--with B` added, and extras."""
    (tmp_path / "uv-receipt.toml").write_text(receipt)
    adds = f"uv pip install --python {tmp_path}/bin/python {requirement}"
    assert llama_build.install_command(requirement, tmp_path) == f"type: {command or adds}"
