"""Check the wheel edgelm-llama-cuda on a machine without a GPU: what it needs, what it exports, and that it loads.

    python packaging/cuda_check.py [--keep FOLDER] dist

It installs what `make dist CUDA=1` made into an environment of its own, with cuBLAS from the index. The backend calls
only functions that edgelm-llama's libraries have, and reads structures of the same version. Without a driver edgelm
says so in one line; with a driver that finds no GPU (a small library in C) it loads whole
and says that. What it computes is for a machine with a GPU: `edgelm doctor` and vulkan_checks.py there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vulkan_check import installed_wheels

SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# A driver that finds no GPU: cuInit's error 100 is CUDA_ERROR_NO_DEVICE.
DRIVER = """
#include <string.h>
static int no_device(void) { return 100; }
static int version(int *number) { *number = 13000; return 0; }
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *number) { return version(number); }
int cuGetProcAddress(const char *name, void **function, int cuda, unsigned long long flags) {
    *function = !strcmp(name, "cuDriverGetVersion") ? (void *)version : (void *)no_device;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **function, int cuda, unsigned long long flags, int *status) {
    if (status) *status = 0;
    return cuGetProcAddress(name, function, cuda, flags);
}
"""
# Loads the backend as edgelm does, and prints its version of the interface, its name, and its devices.
LOAD = """
import ctypes
from edgelm.backends.llama.binding import BUILD, L, gpu_problem
from edgelm.base.machine.llama_build import GPU_WHEELS, gpu_library
class Backend(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("name", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p))]
library = ctypes.CDLL(str(gpu_library(GPU_WHEELS[0], BUILD)))
library.ggml_backend_init.restype = ctypes.POINTER(Backend)
backend = library.ggml_backend_init()
count = L._lib.ggml_backend_reg_dev_count
count.argtypes = [ctypes.c_void_p]
name = backend.contents.name(ctypes.cast(backend, ctypes.c_void_p)).decode()
print(f"interface {backend.contents.version}, backend {name}, {count(backend)} devices; {gpu_problem}")
"""


def needed(library: Path) -> set[str]:
    """Return the libraries that a library needs."""
    lines = _run("readelf", "-dW", library).splitlines()
    return {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}


def symbols(library: Path, kind: str) -> set[str]:
    """Return the defined or undefined symbols of a library, without their versions."""
    return {line.split()[-1].partition("@")[0] for line in _run("nm", "-D", f"--{kind}-only", library).splitlines()}


def check_library(packages: Path) -> None:
    """Compare the library with those of edgelm-llama; print its size and what it needs."""
    library = packages / "edgelm_llama_cuda" / "lib" / "libggml-cuda.so"
    base = packages / "edgelm_llama" / "lib" / "libggml-base.so"
    wanted = needed(library)
    foreign = sorted(wanted - SYSTEM - {base.name, "libcuda.so.1"})
    assert len(foreign) == 1, f"the library needs {foreign}, not cuBLAS alone"
    assert foreign[0].startswith("libcublas.so."), foreign
    assert any(packages.glob(f"nvidia/*/lib/{foreign[0]}")), f"no requirement of the wheel has {foreign[0]}"
    undefined = {name for name in symbols(library, "undefined") if name.startswith(("ggml_", "gguf_"))}
    missing = undefined - symbols(base, "defined")
    assert not missing, f"edgelm-llama lacks {sorted(missing)}"
    exported = {name for name in symbols(library, "defined") if name.startswith("ggml_")}
    assert "ggml_backend_init" in exported, exported
    size = library.stat().st_size
    print(f"{library.name}: {size / 1e6:.1f} MB, needs {', '.join(sorted(wanted))}")
    print(f"{len(undefined)} functions of libggml-base.so, all there; exports {', '.join(sorted(exported))}")


def check_loading(python: Path, folder: Path) -> None:
    """Load the backend without a driver and with one that finds no GPU; print what edgelm says."""
    problem = doctor(python, folder, {})
    assert "edgelm-llama-cuda cannot be loaded: libcuda.so.1: cannot open shared object file" in problem, problem
    print(f"no driver: {problem}")
    (folder / "driver").mkdir(exist_ok=True)
    source = folder / "driver" / "cuda.c"
    stub = folder / "driver" / "libcuda.so.1"
    names = {name for name in symbols(_library(python), "undefined") if name.startswith("cu") and name[2:3].isupper()}
    others = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names))
    source.write_text(DRIVER + others, encoding="utf-8")
    _run(os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", stub, source)
    environment = {"LD_LIBRARY_PATH": str(stub.parent)}
    problem = doctor(python, folder, environment)
    assert problem.startswith("edgelm-llama-cuda finds no GPU ("), problem
    print(f"a driver without a GPU: {problem}")
    print(_run(python, "-c", LOAD, environment=environment).strip())


def doctor(python: Path, folder: Path, environment: dict[str, str]) -> str:
    """Return what `edgelm doctor` says about llama.cpp's GPUs; it ends with 1 where it finds a problem."""
    done = subprocess.run(
        [python.with_name("edgelm"), "doctor", "--json"],
        env=os.environ | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    findings = json.loads(done.stdout)["findings"]
    return str(next(finding["text"] for finding in findings if finding["topic"] == "GPUs of llama.cpp"))


def _library(python: Path) -> Path:
    return next(python.parents[1].glob("lib/python*/site-packages/edgelm_llama_cuda/lib/libggml-cuda.so"))


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    variables = os.environ | {"LC_ALL": "C"} | (environment or {})
    return subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    """Install the wheels of a folder, and check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="keep the environment there")
    parser.add_argument("wheels", type=Path, help="a folder that `make dist CUDA=1` made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgelm-cuda-") as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        python = installed_wheels(folder, arguments.wheels.resolve())
        check_library(_library(python).parents[2])
        check_loading(python, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
