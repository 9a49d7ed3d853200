"""The wheels of edgelm-llama: the same bytes from the same files, valid, and clear where they must be compiled."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.tags import mac_platforms

from edgelm.base.machine.llama_build import SUPPORTED

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


backend = load(PACKAGING / "llama" / "backend.py")
sys.path.insert(0, str(PACKAGING))
libraries = load(PACKAGING / "llama_libraries.py")
gpu = load(PACKAGING / "gpu_library.py")
cuda = load(PACKAGING / "cuda_library.py")
dist_check = load(PACKAGING / "dist_check.py")
sys.path.remove(str(PACKAGING))

FILES = {"edgelm_llama/lib/libllama.so": b"\x7fELF", "edgelm_llama/__init__.py": b""}


@pytest.mark.parametrize(("target", "system"), [("13.3", 13), ("", 26)])
@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
def test_a_macs_wheel_is_for_its_processor(
    monkeypatch: pytest.MonkeyPatch, target: str, system: int, machine: str
) -> None:
    """Python's own platform says universal2, and a system older than any with such a processor; pip takes neither."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("sysconfig.get_platform", lambda: "macosx-10.13-universal2")
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("platform.mac_ver", lambda: ("26.1", ("", "", ""), machine))
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
    assert libraries.platform_tag() in mac_platforms((system, 4), machine)
    assert libraries.platform_tag() not in mac_platforms((system - 1, 0), machine)


def test_the_same_files_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, files in ((one, FILES), (other, dict(reversed(FILES.items())))):
        folder.mkdir()
        backend.write_wheel(folder, "py3-none-linux_x86_64", files, ["numpy"])
        backend.write_sdist(folder)
        os.umask(os.umask(0o027))
    names = sorted(path.name for path in one.iterdir())
    assert names == ["edgelm_llama-0.3.36.2-py3-none-linux_x86_64.whl", "edgelm_llama-0.3.36.2.tar.gz"]
    assert [(one / name).read_bytes() for name in names] == [(other / name).read_bytes() for name in names]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    assert backend.write_sdist(other).read_bytes() != (one / names[1]).read_bytes()


@pytest.fixture
def reproducible(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build backend of edgelm."""
    pytest.importorskip("setuptools")
    monkeypatch.setitem(sys.modules, "backend", backend)
    return load(PACKAGING / "backend" / "reproducible.py")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_each_install_of_a_checkout_tells_of_the_compiler(
    reproducible: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    told: list[str] = []
    name = f"prepare_metadata_for_build_{kind}"
    monkeypatch.chdir(PACKAGING.parent)
    monkeypatch.setattr(reproducible.llama, "tell_of_the_compiler", told.append)
    monkeypatch.setattr(reproducible.build_meta, name, lambda *_: "edgelm.dist-info")
    assert getattr(reproducible, name)("folder") == "edgelm.dist-info"
    assert told == [sys.prefix]


def test_one_switch_decides_which_llama_cpp_edgelm_requires(
    reproducible: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (PACKAGING.parent / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(reproducible.released(source))["project"]
    ours = str(backend.project()["version"])
    assert ours.startswith(f"{SUPPORTED}.")
    assert ours != "0.3.36.1", "an upgrade has to replace that of 0.5, which has no libmtmd"
    pin = f">={ours},<"
    assert next(line for line in project["dependencies"] if "llama" in line).startswith(f"edgelm-llama{pin}")
    for extra, name in (("llama-cuda", "cuda"), ("vulkan", "vulkan")):
        (requirement,) = project["optional-dependencies"][extra]
        assert requirement.startswith(f"edgelm-llama-{name}{pin}")
        assert requirement.endswith("; sys_platform == 'linux'")
    assert reproducible.released(reproducible.released(source)) == reproducible.released(source)
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(source, encoding="utf-8")
    seen = []
    for settings in (None, {}, {"llama": "ready-made"}):
        with reproducible._requirements(settings):
            seen.append(Path("pyproject.toml").read_text(encoding="utf-8"))
    assert seen == [source, source, reproducible.released(source)]
    assert Path("pyproject.toml").read_text(encoding="utf-8") == source
    with (
        pytest.raises(SystemExit, match="llama=compiled is not known"),
        reproducible._requirements({"llama": "compiled"}),
    ):
        pass


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No compiler, no other place of wheels, a terminal of our own; return the terminal's file."""
    terminal = tmp_path / "tty"
    terminal.touch()
    monkeypatch.setattr(backend, "TERMINAL", terminal)
    monkeypatch.setattr(backend.shutil, "which", lambda _: None)
    monkeypatch.setattr(backend, "_callers", lambda: iter(()))
    monkeypatch.setattr(backend, "_read", lambda _: "")
    for name in list(os.environ):
        if name == "CXX" or backend.PLACES.search(name):
            monkeypatch.delenv(name)
    return terminal


def test_a_checkout_without_a_compiler_refuses_at_once(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler\. Install one .* or name a place with a wheel"):
        backend.tell_of_the_compiler(str(tmp_path))
    assert backend.CANNOT_COMPILE in bare.read_text()


def test_a_checkout_with_a_compiler_says_what_comes(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.shutil, "which", lambda name: f"/usr/bin/{name}")
    backend.tell_of_the_compiler(str(tmp_path))
    assert "compiles llama.cpp, unless it finds a wheel" in bare.read_text()
    bare.write_text("")
    (tmp_path / "lib/python3.12/site-packages/llama_cpp_python-0.3.36.dist-info").mkdir(parents=True)
    backend.tell_of_the_compiler(str(tmp_path))
    assert bare.read_text() == "", "it is installed: nothing is compiled"


@pytest.mark.parametrize("how", ["--python {}/bin/python", "--python={}", "-p {}", "VIRTUAL_ENV={}", "CONDA_PREFIX={}"])
def test_uv_builds_elsewhere_and_what_it_installs_into_counts(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    target = tmp_path / "target"
    (target / "lib/python3.12/site-packages/llama_cpp_python-0.3.36.dist-info").mkdir(parents=True)
    (target / "bin").mkdir()
    (target / "bin" / "python").touch()
    said = how.format(target)
    files = {
        "/proc/7/cmdline": "\0".join(["/usr/bin/uv", "pip", "install", *(said.split() if said[0] == "-" else ()), "."]),
        "/proc/7/environ": "" if said[0] == "-" else f"HOME=/\0{said}\0",
    }
    monkeypatch.setattr(backend, "_callers", lambda: iter((7,)))
    monkeypatch.setattr(backend, "_read", lambda path: files.get(path, ""))
    backend.tell_of_the_compiler(str(tmp_path / "build"))
    assert bare.read_text() == "", "it is installed: nothing is compiled"
    shutil.rmtree(target / "lib")
    with pytest.raises(SystemExit):
        backend.tell_of_the_compiler(str(tmp_path / "build"))


def test_a_tool_of_uv_gets_an_environment_of_its_own(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--python names the interpreter that it is made with: what is installed beside that is of no use."""
    other = tmp_path / "other"
    (other / "lib/python3.12/site-packages/llama_cpp_python-0.3.36.dist-info").mkdir(parents=True)
    command = "\0".join(["uv", "tool", "install", "--python", str(other), "."])
    files = {"/proc/7/cmdline": command, "/proc/7/environ": f"VIRTUAL_ENV={other}\0"}
    monkeypatch.setattr(backend, "_callers", lambda: iter((7,)))
    monkeypatch.setattr(backend, "_read", lambda path: files.get(path, ""))
    monkeypatch.setenv("UV_TOOL_DIR", str(tmp_path / "tools"))
    with pytest.raises(SystemExit):
        backend.tell_of_the_compiler(str(tmp_path / "build"))
    (other / "lib").rename(tmp_path / "lib")
    (tmp_path / "tools" / "edgelm").mkdir(parents=True)
    (tmp_path / "lib").rename(tmp_path / "tools" / "edgelm" / "lib")
    bare.write_text("")
    backend.tell_of_the_compiler(str(tmp_path / "build"))
    assert bare.read_text() == "", "an upgrade leaves it where it is"


@pytest.mark.parametrize(
    "command",
    ["pip\0install\0--find-links\0dist\0.", "uv\0tool\0install\0--index\0x\0.", "pip\0wheel\0--extra-index-url=x\0."],
)
def test_a_place_that_is_named_may_have_a_wheel(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)  # uv may install into the .venv there
    own = f"/proc/{os.getpid()}/cmdline"
    monkeypatch.setattr(backend, "_callers", lambda: iter((os.getpid(),)))
    monkeypatch.setattr(backend, "_read", lambda path: command if path == own else "")
    backend.tell_of_the_compiler(str(tmp_path))
    assert backend.MAY_COMPILE.strip() in bare.read_text()
    monkeypatch.setattr(backend, "_read", lambda path: command.replace("-", "") if path == own else "")
    with pytest.raises(SystemExit):
        backend.tell_of_the_compiler(str(tmp_path))


def test_the_umask_does_not_change_a_wheel_of_edgelm(reproducible: ModuleType, tmp_path: Path) -> None:
    wheels = []
    for number, (text, program) in enumerate([(0o100644, 0o100755), (0o100600, 0o100700)]):
        path = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, mode in (("a.py", text), ("b.data/scripts/b", program)):
                entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
                entry.external_attr = mode << 16
                archive.writestr(entry, "x = 1\n" * 100)
        reproducible.set_permissions(path)
        wheels.append(path)
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as archive:
        assert archive.testzip() is None
        assert [oct(entry.external_attr >> 16) for entry in archive.infolist()] == ["0o100644", "0o100755"]
        assert archive.read("a.py") == b"x = 1\n" * 100


def test_a_wheel_is_valid(tmp_path: Path) -> None:
    path = backend.write_wheel(tmp_path, "py3-none-linux_x86_64", FILES, ["numpy>=2"])
    with zipfile.ZipFile(path) as archive:
        info = "edgelm_llama-0.3.36.2.dist-info"
        names = set(archive.namelist())
        assert names == {*FILES, *(f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE"))}
        for line in archive.read(f"{info}/RECORD").decode().splitlines():
            name, digest, size = line.split(",")
            data = archive.read(name)
            if name != f"{info}/RECORD":
                expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert (digest, size) == (f"sha256={expected}", str(len(data)))
        assert "Requires-Dist: numpy>=2\n" in archive.read(f"{info}/METADATA").decode()
        assert "Root-Is-Purelib: false" in archive.read(f"{info}/WHEEL").decode()


@pytest.mark.parametrize("backend_name", ["vulkan", "cuda"])
def test_a_wheel_for_gpus_requires_the_build_that_it_belongs_to(tmp_path: Path, backend_name: str) -> None:
    library, licence = tmp_path / f"libggml-{backend_name}.so", tmp_path / "LICENSE"
    library.write_bytes(b"\x7fELF")
    licence.write_text("MIT")
    build = gpu.Build(write_sdist(tmp_path, SUPPORTED), backend_name, "Some GPU", "cc", {}, ("cublas>=13",))
    path = gpu.package_library(build, library, licence, tmp_path)
    assert path.name == build.wheel_name
    version, package = backend.project()["version"], f"edgelm_llama_{backend_name}"
    with zipfile.ZipFile(path) as archive:
        assert archive.read(f"{package}/lib/libggml-{backend_name}.so") == b"\x7fELF"
        assert f"Some GPU: lib/libggml-{backend_name}.so" in archive.read(f"{package}/__init__.py").decode()
        metadata = archive.read(f"{package}-{version}.dist-info/METADATA").decode().splitlines()
    assert f"Name: edgelm-llama-{backend_name}" in metadata
    requirements = {"Requires-Dist: cublas>=13", f"Requires-Dist: edgelm-llama=={version}"}
    assert {f"Version: {version}", *requirements} <= set(metadata)


def write_toolkit(folder: Path, version: str) -> Path:
    """Write a CUDA toolkit whose nvcc says this version, and does nothing else."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}'\n")
    nvcc.chmod(0o755)
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CUDA wheel is for Linux")
@pytest.mark.parametrize(
    ("version", "requirement"), [("12.9.86", "nvidia-cublas-cu12>=12.8,<13"), ("13.0.88", "nvidia-cublas>=13,<14")]
)
def test_the_cuda_wheel_requires_the_cublas_of_its_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, requirement: str
) -> None:
    toolkit = write_toolkit(tmp_path / "toolkit", version)
    monkeypatch.setenv("EDGELM_CUDA_TOOLS", str(toolkit))
    monkeypatch.delenv("EDGELM_CUDA_TARGETS", raising=False)
    monkeypatch.setattr(cuda, "plan_build", lambda *_: libraries.Build(tmp_path, "", "cc"))
    sdist = write_sdist(tmp_path, SUPPORTED)
    build = cuda.plan_cuda(sdist, tmp_path)
    assert build.requirements == (requirement,)
    assert build.options["CMAKE_CUDA_COMPILER"] == str(toolkit / "bin" / "nvcc")
    assert [target.partition("-")[0] for target in build.options["CMAKE_CUDA_ARCHITECTURES"].split(";")] == [
        "75", "80", "86", "89", "90", "120a"
    ]  # fmt: skip
    monkeypatch.setenv("EDGELM_CUDA_TARGETS", "86-real")
    other = cuda.plan_cuda(sdist, tmp_path)
    assert other.options["CMAKE_CUDA_ARCHITECTURES"] == "86-real"
    assert other.key != build.key, "a wheel for fewer GPUs is not taken for one for all"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CUDA wheel is for Linux")
def test_a_toolkit_without_a_wheel_of_cublas_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "plan_build", lambda *_: libraries.Build(tmp_path, "", "cc"))
    monkeypatch.setenv("EDGELM_CUDA_TOOLS", str(write_toolkit(tmp_path / "old", "11.8.89")))
    with pytest.raises(libraries.BuildError, match=r"is of no CUDA release that has a wheel: .*11\.8"):
        cuda.plan_cuda(tmp_path, tmp_path)
    monkeypatch.setenv("EDGELM_CUDA_TOOLS", str(tmp_path / "none"))
    with pytest.raises(libraries.BuildError, match="nvcc is needed"):
        cuda.plan_cuda(tmp_path, tmp_path)


def write_sdist(folder: Path, version: str) -> Path:
    """Write an sdist of llama-cpp-python that holds its PKG-INFO only."""
    text = f"Metadata-Version: 2.1\nVersion: {version}\n".encode()
    path = folder / f"llama_cpp_python-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo(f"llama_cpp_python-{version}/PKG-INFO")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return path


def test_a_kept_build_folder_is_gone_on_with_only_for_the_pinned_release(tmp_path: Path) -> None:
    sdist, kept = write_sdist(tmp_path, SUPPORTED), tmp_path / "kept"
    source = libraries.unpack_source(sdist, kept)
    assert source == kept / f"llama_cpp_python-{SUPPORTED}"
    (source / "made").touch()
    assert (libraries.unpack_source(sdist, kept) / "made").exists()
    older = tmp_path / "older"
    with tarfile.open(write_sdist(tmp_path, "0.3.35")) as archive:
        archive.extractall(older, filter="data")
    with pytest.raises(
        libraries.BuildError, match=rf"0\.3\.35 is llama-cpp-python 0\.3\.35, not {SUPPORTED}: name an empty"
    ):
        libraries.unpack_source(sdist, older)
    (source / "PKG-INFO").unlink()
    with pytest.raises(libraries.BuildError, match=rf"is llama-cpp-python unknown, not {SUPPORTED}"):
        libraries.unpack_source(sdist, kept)


def test_an_older_build_folder_is_one_line_and_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, sdist = tmp_path / "kept", write_sdist(tmp_path, SUPPORTED)
    with tarfile.open(write_sdist(tmp_path, "0.3.35")) as archive:
        archive.extractall(kept, filter="data")
    monkeypatch.setenv("EDGELM_WHEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu, "fetch_sdist", lambda _: sdist)
    monkeypatch.setattr(sys, "argv", ["vulkan_library.py", "--build", str(kept), "--out", str(tmp_path / "out")])
    assert gpu.build_and_print("Vulkan", lambda sdist, _: gpu.Build(sdist, "vulkan", "Vulkan", "cc")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert f"llama-cpp-python 0.3.35, not {SUPPORTED}" in error
    assert not (tmp_path / "out").exists()


def test_the_sdist_says_that_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = tmp_path / "tty"
    terminal.touch()
    monkeypatch.setattr(backend, "TERMINAL", terminal)
    monkeypatch.setattr(backend.shutil, "which", lambda name: f"/usr/bin/{name}")
    name = backend.build_wheel(str(tmp_path))
    assert name == "edgelm_llama-0.3.36.2-py3-none-any.whl"
    assert "compiles" in terminal.read_text()
    assert "To avoid that" in terminal.read_text()
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert not [member for member in archive.namelist() if not member.startswith("edgelm_llama-")]
        (metadata,) = (member for member in archive.namelist() if member.endswith("/METADATA"))
        assert "Requires-Dist: llama-cpp-python>=" in archive.read(metadata).decode()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="macOS has wheels, and no /proc")
def test_it_says_so_on_the_terminal_of_pipx_which_runs_pip_without_one(tmp_path: Path) -> None:
    build = f"import sys; sys.path.insert(0, {str(PACKAGING / 'llama')!r}); import backend; backend.build_wheel('.')"
    pipx = "import subprocess, sys; no = subprocess.DEVNULL; subprocess.run([sys.executable, '-c', sys.argv[1]], "
    pipx += "start_new_session=True, stdin=no, stdout=no, stderr=no, check=True)"
    environment = {"PATH": os.environ["PATH"], "CC": "cc"}
    shown = dist_check.run_on_terminal([sys.executable, "-c", pipx, build], tmp_path, environment)
    assert [line for line in shown.splitlines() if line] == [backend.NOTICE.strip()]


def test_without_a_compiler_the_sdist_refuses_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(backend.shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match=r"no ready-made llama\.cpp for this platform, and no C compiler"):
        backend.build_wheel(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_sdist_holds_what_its_build_needs(tmp_path: Path) -> None:
    with tarfile.open(backend.write_sdist(tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == {"LICENSE", "PKG-INFO", "backend.py", "pyproject.toml"}


BINDING = """
from llama_cpp._ctypes_extensions import load_shared_library
_override_base_path = os.environ.get("LLAMA_CPP_LIB_PATH")
class {name}(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int32), ("value", ctypes.c_bool)]
"""


MTMD = """
import llama_cpp.llama_cpp as llama_cpp
from llama_cpp._ctypes_extensions import load_shared_library
_libmtmd_override_path = os.environ.get("MTMD_CPP_LIB")
class {name}(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p)]
"""


def write_source(folder: Path, binding: str, mtmd: str = MTMD.format(name="mtmd_input_text")) -> Path:
    for name, text in (
        ("llama_cpp/llama_cpp.py", binding),
        ("llama_cpp/mtmd_cpp.py", mtmd),
        ("llama_cpp/_ctypes_extensions.py", ""),
        ("llama_cpp/__init__.py", '__version__ = "0.3.36"'),
        ("LICENSE.md", "MIT"),
        ("vendor/llama.cpp/LICENSE", "MIT"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_binding_finds_our_libraries_whatever_the_environment_says(tmp_path: Path) -> None:
    files = libraries.python_files(write_source(tmp_path, BINDING.format(name="llama_batch")), "abc")
    binding = files["edgelm_llama/llama_cpp.py"].decode()
    assert "environ" not in binding
    assert "from edgelm_llama._ctypes_extensions import load_shared_library" in binding
    assert 'COMMIT = "abc"' in files["edgelm_llama/build.py"].decode()
    mtmd = files["edgelm_llama/mtmd_cpp.py"].decode()
    assert "environ" not in mtmd
    assert "llama_cpp.llama_cpp" not in mtmd.replace("edgelm_llama.llama_cpp", "")
    assert "from edgelm_llama._ctypes_extensions import load_shared_library" in mtmd


@pytest.mark.parametrize("gone", ["LLAMA_CPP_LIB_PATH", "llama_cpp._ctypes_extensions"])
def test_a_binding_of_another_form_is_not_built(tmp_path: Path, gone: str) -> None:
    source = write_source(tmp_path, BINDING.format(name="llama_batch").replace(gone, "other"))
    with pytest.raises(libraries.BuildError, match="binding has changed"):
        libraries.python_files(source, "abc")


@pytest.mark.parametrize("gone", ["MTMD_CPP_LIB", "llama_cpp._ctypes_extensions", "import llama_cpp.llama_cpp"])
def test_a_binding_of_libmtmd_of_another_form_is_not_built(tmp_path: Path, gone: str) -> None:
    mtmd = MTMD.format(name="mtmd_input_text").replace(gone, "other")
    with pytest.raises(libraries.BuildError, match="libmtmd has changed"):
        libraries.python_files(write_source(tmp_path, BINDING.format(name="llama_batch"), mtmd), "abc")


def test_the_fields_whose_layout_is_compared_are_the_bindings(tmp_path: Path) -> None:
    binding = "\n".join(BINDING.format(name=name) for name in libraries.STRUCTURES)
    lines = list(libraries.layout_lines(write_source(tmp_path, binding), "llama_cpp.py", libraries.STRUCTURES))
    assert lines[:3] == [
        "STRUCT(llama_model_params)\n",
        "FIELD(llama_model_params, first)\n",
        "FIELD(llama_model_params, value)\n",
    ]
    assert "FIELD(llama_model_kv_override, value)\n" not in lines  # it has no name in C
