"""llama-cpp-python's low-level binding `L`, over the installed build of llama.cpp.

    from edgelm.backends.llama.binding import L

Importing it loads native code. With the libraries of edgelm-llama, the layouts of the structures are compared first,
and the backends are loaded from the folder of the package. llama.cpp itself would look for backends beside the program
and in the current folder, where anybody may have put one.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelm.base.errors import EngineError
from edgelm.base.machine.gpu import driver_place, standing_gpu
from edgelm.base.machine.llama_build import GPU_WHEELS, INSTALL, GpuWheel, InstalledLlama, find_build, gpu_library

if TYPE_CHECKING:
    from llama_cpp import llama_cpp as L

__all__ = ["BUILD", "L", "cpu_library", "gpu_problem", "load_mtmd"]

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
_NAMES = {"cuda": b"CUDA", "vulkan": b"Vulkan"}  # of backends, in ggml's registry
_DRIVERS = {
    "cuda": f"install or update NVIDIA's driver{driver_place()} (525 or newer for CUDA 12, 580 for CUDA 13)",
    "vulkan": "install your GPU's driver for Vulkan (Debian, Ubuntu: libvulkan1 mesa-vulkan-drivers)",
}
# A system without a compiler may lack these. edgelm-llama needs no libgomp: packaging/llama/threads.c is in its place.
_DEBIAN = {"libgomp": "libgomp1", "libstdc++": "libstdc++6", "libgcc_s": "libgcc-s1"}
_MISSING = re.compile(r"(lib[\w.+-]+\.so[\d.]*): cannot open shared object file")
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


class _Entry(ctypes.Structure):
    """An entry of packaging/llama/abi.c: a structure, or a field of one, with its offset and size."""

    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("size", ctypes.c_size_t))


def layout_difference(binding: Any, entries: Any) -> str:
    """Compare the ctypes structures of a binding with C's entries, which end with one without a name.

    Return the first difference; empty: there is none.
    """
    for entry in entries:
        if entry.name is None:
            return ""
        name, _, field = entry.name.decode().partition(".")
        structure = getattr(binding, name, None)
        if structure is None:
            return f"the binding has no {name}"
        if not field:
            found = (0, ctypes.sizeof(structure))
        elif (place := getattr(structure, field, None)) is None:
            return f"the binding has no {name}.{field}"
        else:
            found = (place.offset, place.size)
        if found != (entry.offset, entry.size):
            return f"{entry.name.decode()}: offset and size are {found}, not {(entry.offset, entry.size)}"
    raise AssertionError("the entries have an end")


def _load(build: InstalledLlama) -> tuple[Any, Path, str]:
    """Return the binding, the library that computes on the processor, and `gpu_problem`. Raises EngineError."""
    try:
        if not build.ready_made:
            binding = import_module("llama_cpp.llama_cpp")
            problems = filter(None, (_own_gpu_problem(binding, build), _load_gpu_wheels(binding, build)))
            return binding, build.lib_dir / f"libggml-cpu{_SUFFIX}", ". ".join(problems)
        binding = import_module("edgelm_llama.llama_cpp")
        entries = ctypes.CDLL(str(build.lib_dir / f"libedgelm_abi{_SUFFIX}"))
    except (OSError, RuntimeError, AttributeError) as error:
        raise EngineError(f"llama.cpp cannot be loaded: {error}", _repair(str(error), build)) from error
    if difference := layout_difference(binding, _table(entries, "edgelm_abi")):
        raise EngineError(f"edgelm-llama is damaged: {difference}", INSTALL)
    return binding, *_load_backends(binding, build)


def _repair(reason: str, build: InstalledLlama) -> str:
    """Return the hint for a build of llama.cpp whose libraries cannot be loaded."""
    if not (missing := _MISSING.search(reason)):
        return INSTALL
    package = _DEBIAN.get(missing[1].partition(".so")[0])
    hint = f"install {missing[1]}" + (f" (Debian, Ubuntu: {package})" if package else "")
    if missing[1].startswith("libcuda.so"):
        hint = _driver_hint("cuda")
    return hint if build.ready_made else f"{hint}, or uninstall {build.package}"


def _load_backends(binding: Any, build: InstalledLlama) -> tuple[Path, str]:
    """Load the best CPU variant for this processor, and the GPU backends. Return the former's path, and `gpu_problem`.

    Not by ggml_backend_load_all_from_path, which also loads the library in GGML_BACKEND_PATH. Raises EngineError.
    """
    binding.llama_log_set(_SILENT, None)  # it would print a line; who starts the backend sets a log of its own
    load = binding._lib.ggml_backend_load  # noqa: SLF001 - the binding leaves these functions out
    load.argtypes, load.restype = [ctypes.c_char_p], ctypes.c_void_p
    # Backends are modules, which have this suffix on macOS, too.
    variants = sorted(((_score(path), path) for path in build.lib_dir.glob("libggml-cpu-*.so")), reverse=True)
    for score, path in variants:
        if score > 0 and load(str(path).encode()):
            break
    else:
        raise EngineError("edgelm-llama has no kernels for this processor", "pip install llama-cpp-python")
    metal = build.lib_dir / "libggml-metal.so"
    if metal.exists():
        load(str(metal).encode())
    return path, _load_gpu_wheels(binding, build)


def _load_gpu_wheels(binding: Any, build: InstalledLlama) -> str:
    """Load the backends in our wheels for GPUs. Return why those that are installed are of no use; empty: they are."""
    return ". ".join(filter(None, (_load_gpu_wheel(wheel, binding, build) for wheel in GPU_WHEELS)))


def _own_gpu_problem(binding: Any, build: InstalledLlama) -> str:
    """Return why the backend for GPUs of somebody's build is of no use; empty: it is, or there is none."""
    backend = next((name for name in _NAMES if (build.lib_dir / f"libggml-{name}{_SUFFIX}").exists()), None)
    if backend is None:
        return ""
    native = binding._lib  # noqa: SLF001 - as above
    native.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    native.ggml_backend_reg_dev_count.argtypes = [ctypes.c_void_p]
    with _log_of(binding) as lines:  # the first call starts the backends
        found = native.ggml_backend_reg_by_name(_NAMES[backend])
    if found and native.ggml_backend_reg_dev_count(found):
        return ""
    return f"{build.package} {build.version} with {_NAMES[backend].decode()} {_no_device(lines, backend)}"


def _no_device(lines: Sequence[str], backend: str) -> str:
    """Return that a backend finds no GPU, why by what it logged, and what to do."""
    reason = next((f" ({line.rpartition(': ')[2]})" for line in lines if "failed to initialize" in line), "")
    return f"finds no GPU{reason}; {_driver_hint(backend)}"


def _driver_hint(backend: str) -> str:
    card = standing_gpu() if backend == "cuda" else None
    return card.hint if card and card.hint else _DRIVERS[backend]


@contextmanager
def _log_of(binding: Any) -> Iterator[list[str]]:
    """Yield the list of the lines that llama.cpp logs in the block."""
    lines: list[str] = []
    log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
        lambda _level, text, _data: lines.append((text or b"").decode(errors="replace").strip())
    )
    binding.llama_log_set(log, None)
    yield lines
    binding.llama_log_set(_SILENT, None)


def _load_gpu_wheel(wheel: GpuWheel, binding: Any, build: InstalledLlama) -> str:
    """Load the backend of one wheel. Return why it is of no use; empty: it is, or is not installed."""
    try:
        library = gpu_library(wheel, build)
    except EngineError as error:
        return f"{error.message}; {error.hint}"
    if library is None:
        return ""
    native = binding._lib  # noqa: SLF001 - as above
    native.ggml_backend_load.restype = ctypes.c_void_p
    with _log_of(binding) as lines:
        backend = native.ggml_backend_load(str(library).encode())
    native.ggml_backend_reg_dev_count.argtypes = [ctypes.c_void_p]
    if backend and native.ggml_backend_reg_dev_count(backend):
        return ""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:  # most often: the system has no libvulkan.so.1 or libcuda.so.1, which come with the driver
        # cuBLAS comes with a requirement of the wheel.
        hint = wheel.hint if "libcublas" in str(error) else _driver_hint(wheel.backend)
        return f"{wheel.package} cannot be loaded: {error}; {hint}"
    return f"{wheel.package} {_no_device(lines, wheel.backend)}"


def load_mtmd() -> Any:
    """Return the binding of libmtmd, which encodes pictures. Raises EngineError where the installed build has none."""
    package = "edgelm_llama" if BUILD.ready_made else "llama_cpp"
    try:
        binding = import_module(f"{package}.mtmd_cpp")
        entries = ctypes.CDLL(str(BUILD.lib_dir / f"libedgelm_abi{_SUFFIX}")) if BUILD.ready_made else None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise EngineError(f"{BUILD.package} {BUILD.version} has no libmtmd, which encodes pictures", INSTALL) from error
    if entries is not None and (difference := layout_difference(binding, _table(entries, "edgelm_mtmd_abi"))):
        raise EngineError(f"edgelm-llama is damaged: {difference}", INSTALL)
    return binding


def _table(library: ctypes.CDLL, name: str) -> Any:
    return ctypes.cast(ctypes.byref(ctypes.c_char.in_dll(library, name)), ctypes.POINTER(_Entry))


def _score(library: Path) -> int:
    """Return how good a variant is for this processor; 0: it cannot run here."""
    try:
        return int(ctypes.CDLL(str(library)).ggml_backend_score())
    except (OSError, AttributeError):
        return 0


BUILD = find_build()
if not TYPE_CHECKING:
    L, cpu_library, gpu_problem = _load(BUILD)
else:
    cpu_library: Path
    gpu_problem: str  # why an installed GPU backend is not used
