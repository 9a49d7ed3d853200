"""Builds the platform wheel edgelm-llama-cuda: llama.cpp's CUDA backend, from the same sdist as edgelm-llama.

Owns the CUDA toolkit that it is compiled with, and the GPUs that it is compiled for. Prints the wheel's path.

    python packaging/cuda_library.py [--out dist] [--build FOLDER]

Needs cmake and a C++ compiler. The toolkit is that in the folder EDGELM_CUDA_TOOLS, such as /usr/local/cuda, or else
CUDA 13.0 from PyPI, kept in the cache: PyPI's packages of CUDA 12 have no nvcc. The driver must be of the toolkit's
major version: 525 or newer for CUDA 12, 580 for CUDA 13. EDGELM_CUDA_TARGETS are CMake's CUDA architectures; JOBS sets
the number of processes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_library import Build, build_and_print
from llama_libraries import plan_build, run
from llama_wheel import BuildError, say

# The oldest CUDA 13, which runs with every driver that knows CUDA 13.
RELEASE = "13.0"
PACKAGES = ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl", "cublas")
# From Turing on, the oldest with int8 tensor cores: RTX 20, A100, RTX 30, RTX 40, H100, RTX 50. A GPU between or after
# them (B200, DGX Spark) gets its machine code from the assembly of 9.0, by the driver.
TARGETS = "75-real;80-real;86-real;89-real;90;120a-real"
# The releases of cuBLAS that a wheel may be used with; that of CUDA 12 also comes with torch up to 2.10.
CUBLAS = {12: "nvidia-cublas-cu12>=12.8,<13", 13: "nvidia-cublas>=13,<14"}
# What the backend calls of the driver. It is linked with a library of these names, which is not shipped: the machine
# that compiles may have no driver.
DRIVER = (
    "cuDeviceGet cuDeviceGetAttribute cuGetErrorString cuMemAddressFree cuMemAddressReserve cuMemCreate "
    "cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap"
)


def plan_cuda(sdist: Path, cache: Path) -> Build:
    """Return the build of this machine. Raises BuildError without a toolkit, and on a platform without CUDA wheel."""
    if not sys.platform.startswith("linux"):
        raise BuildError("the CUDA wheel is for Linux")
    compiler = plan_build(sdist, "").compiler
    folder = os.environ.get("EDGELM_CUDA_TOOLS")
    toolkit = Path(folder).resolve() if folder else fetch_toolkit(cache)
    nvcc = toolkit / "bin" / "nvcc"
    try:
        version = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"nvcc is needed: {error}; without EDGELM_CUDA_TOOLS it comes from PyPI") from error
    release = re.search(r"release (\d+)\.\d+, V(\S+)", version)
    if release is None or int(release[1]) not in CUBLAS:
        raise BuildError(f"{nvcc} is of no CUDA release that has a wheel: {version.strip()}")
    targets = os.environ.get("EDGELM_CUDA_TARGETS") or TARGETS
    options = {"CMAKE_CUDA_COMPILER": str(nvcc), "CMAKE_CUDA_ARCHITECTURES": targets, "CUDAToolkit_ROOT": str(toolkit)}
    tools = f"{compiler}\nnvcc {release[2]}\n{targets}"
    return Build(sdist, "cuda", "CUDA", tools, options, (CUBLAS[int(release[1])],), 360)


def fetch_toolkit(cache: Path) -> Path:
    """Return the folder of PyPI's CUDA toolkit in the cache, or download it. Raises BuildError."""
    folder = cache / f"cuda-{RELEASE}"
    root = folder / "nvidia" / f"cu{RELEASE.partition('.')[0]}"
    if root.exists():
        return root
    say(f"llama.cpp: downloading nvcc {RELEASE} and cuBLAS from PyPI (700 MB)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as temporary:
        scratch = Path(temporary, "toolkit")
        names = [f"nvidia-{name}=={RELEASE}.*" for name in PACKAGES]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        run([*command, "--target", str(scratch), *names], Path(temporary, "log"))
        complete_toolkit(scratch / root.relative_to(folder), Path(temporary, "log"))
        scratch.replace(folder)
    return root


def complete_toolkit(root: Path, log: Path) -> None:
    """Add to PyPI's files what a toolkit has beside them: libraries' names for the linker, and one for the driver."""
    library = root / "lib"
    (root / "lib64").symlink_to("lib")
    for name in ("libcublas.so", "libcublasLt.so", "libcudart.so"):
        (release,) = library.glob(f"{name}.*")
        (library / name).symlink_to(release.name)
    stubs = library / "stubs"
    stubs.mkdir()
    source = stubs / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in DRIVER.split()), encoding="utf-8")
    command = [*shlex.split(os.environ.get("CC") or "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source)]
    run([*command, "-o", str(stubs / "libcuda.so")], log)


if __name__ == "__main__":
    sys.exit(build_and_print("CUDA", plan_cuda))
