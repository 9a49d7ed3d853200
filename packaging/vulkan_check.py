"""Check llama.cpp's GPU side on a software device, Mesa's lavapipe, with our wheels or another Vulkan build.

    python packaging/vulkan_check.py [--wheels FOLDER | --libraries FOLDER] [--keep FOLDER] [--out FILE] [NAME ...]

It downloads Debian's Mesa (apt) and runs vulkan_checks.py with it: text and logits equal to the processor's, snapshots,
mixtures of experts, predicted against true sizes, a device without memory. It installs nothing on the system.
--wheels takes what `make dist VULKAN=1` made, and installs it into an environment of its own. Without it, llama.cpp is
npm's build of release 0.5.0, with the functions that this release lacks (a small library in C, by cc), or the build in
the folder of --libraries: libllama.so, libggml*.so, libggml-vulkan.so.

Owns the downloads and the environment. Needs Linux with apt, and without --wheels x86_64 and npm. Tests only: edgelm
never downloads code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
NPM_PACKAGE = "@node-llama-cpp/linux-x64-vulkan@3.22.1"  # llama.cpp v0.5.0; the binding's is 0.5.0-dev, 0c1e570
MESA = ("mesa-vulkan-drivers", "libvulkan1")
ABSENT = ("libggml-cpu-sapphirerapids.so",)  # GCC 11 computes wrongly with AMX
LIMIT_S = 600

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
void ggml_backend_load_all_from_path(const char *);
__attribute__((constructor)) static void load(void) {{
    Dl_info info;
    char path[PATH_MAX];
    if (!dladdr((void *)load, &info) || !realpath(info.dli_fname, path)) abort();
    *strrchr(path, '/') = 0;
    ggml_backend_load_all_from_path(path);
}}
{missing}
"""

# LD_PRELOAD: a device that gives EDGELM_DEVICE_BYTES, though it reports more. lavapipe's own memory has no end.
SMALL_DEVICE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef void (*function)(void);
typedef function (*getter)(void *, const char *);
typedef struct { int type; const void *next; uint64_t size; uint32_t kind; } allocate_info;
static struct { void *memory; uint64_t size; } blocks[4096];
static uint64_t used;
static function real(const char *name) { return (function)dlsym(dlopen("libvulkan.so.1", RTLD_NOW), name); }
static int allocate(void *device, const allocate_info *info, const void *callbacks, void **memory) {
    if (used + info->size > strtoull(getenv("EDGELM_DEVICE_BYTES"), NULL, 10)) return -2;
    int result = ((int (*)(void *, const allocate_info *, const void *, void **))real("vkAllocateMemory"))(
        device, info, callbacks, memory);
    for (int i = 0; !result && i < 4096; i++)
        if (!blocks[i].memory) { blocks[i].memory = *memory; blocks[i].size = info->size; used += info->size; break; }
    return result;
}
static void release(void *device, void *memory, const void *callbacks) {
    for (int i = 0; memory && i < 4096; i++)
        if (blocks[i].memory == memory) { used -= blocks[i].size; blocks[i].memory = NULL; break; }
    ((void (*)(void *, void *, const void *))real("vkFreeMemory"))(device, memory, callbacks);
}
static function ours(const char *name);
function vkGetDeviceProcAddr(void *device, const char *name) {
    function own = ours(name);
    return own ? own : ((getter)real("vkGetDeviceProcAddr"))(device, name);
}
function vkGetInstanceProcAddr(void *instance, const char *name) {
    function own = ours(name);
    return own ? own : ((getter)real("vkGetInstanceProcAddr"))(instance, name);
}
static function ours(const char *name) {
    if (!strcmp(name, "vkAllocateMemory")) return (function)allocate;
    if (!strcmp(name, "vkFreeMemory")) return (function)release;
    if (!strcmp(name, "vkGetDeviceProcAddr")) return (function)vkGetDeviceProcAddr;
    if (!strcmp(name, "vkGetInstanceProcAddr")) return (function)vkGetInstanceProcAddr;
    return NULL;
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = parser.add_mutually_exclusive_group()
    build.add_argument("--wheels", type=Path, help="a folder that `make dist VULKAN=1` made, instead of npm's build")
    build.add_argument("--libraries", type=Path, help="a folder with a Vulkan build of llama.cpp, instead of npm's")
    parser.add_argument("--keep", type=Path, help="keep the downloads there for the next run")
    parser.add_argument("--out", type=Path, help="write the table into this file, too")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run the checks with this in their name only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgelm-vulkan-") as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | lavapipe(folder)
        if arguments.wheels:
            python = installed_wheels(folder, arguments.wheels.resolve())
            environment["PYTHONPATH"] = str(_tests_only(folder / "path"))
        else:
            python = Path(sys.executable)
            built = arguments.libraries.resolve() if arguments.libraries else _npm_libraries(folder / "npm")
            environment["LLAMA_CPP_LIB_PATH"] = str(_binding_folder(folder / "lib", built))
            environment["PYTHONPATH"] = str(HERE.parent)
        command = [str(python), str(HERE / "vulkan_checks.py"), *arguments.names]
        lines = []
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
    if arguments.out:
        arguments.out.write_text("".join(lines), encoding="utf-8")
    return process.returncode


def lavapipe(folder: Path) -> dict[str, str]:
    """Return the environment variables under which a Vulkan backend finds lavapipe."""
    system = _mesa(folder / "mesa")
    icd = folder / "lavapipe.json"
    driver = {"api_version": "1.1.230", "library_path": str(system / "libvulkan_lvp.so")}
    icd.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}), encoding="utf-8")
    return {
        "LD_LIBRARY_PATH": str(system),
        "VK_ICD_FILENAMES": str(icd),
        "VK_DRIVER_FILES": str(icd),
        "GGML_NO_BACKTRACE": "1",
        "GGML_VK_VISIBLE_DEVICES": "0",  # without it, llama.cpp skips devices of the type CPU
        "EDGELM_SMALL_DEVICE": str(_small_device(folder)),
    }


def installed_wheels(folder: Path, wheels: Path) -> Path:
    """Install all wheels of a folder into a new environment, and return its Python."""
    venv.create(folder / "venv", clear=True, with_pip=True)
    python = folder / "venv" / "bin" / "python"
    files = sorted(map(str, wheels.glob("*.whl")))
    _run([str(python), "-m", "pip", "install", "--quiet", *files], folder)
    return python


def _tests_only(folder: Path) -> Path:
    """Return a folder with the tests' helpers and without edgelm, which is to be the installed one."""
    folder.mkdir(exist_ok=True)
    if not (folder / "tests").is_symlink():
        (folder / "tests").symlink_to(HERE.parent / "tests")
    return folder


def _small_device(folder: Path) -> Path:
    """Return a library that lets allocations on the device fail, when it is preloaded."""
    (folder / "small_device.c").write_text(SMALL_DEVICE, encoding="utf-8")
    library = folder / "small_device.so"
    _run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", str(library), "small_device.c", "-ldl"], folder)
    return library


def _mesa(folder: Path) -> Path:
    """Unpack Debian's Mesa and its missing dependencies; return the folder of its libraries."""
    found = sorted(folder.glob("usr/lib/*/libvulkan_lvp.so"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        planned = _run(["apt-get", "install", "--simulate", "--no-install-recommends", *MESA], folder)
        packages = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
        _run(["apt-get", "download", *dict.fromkeys([*packages, *MESA])], folder)
        for package in folder.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(folder)], folder)
        found = sorted(folder.glob("usr/lib/*/libvulkan_lvp.so"))
    return found[0].parent


def _npm_libraries(folder: Path) -> Path:
    """Return the folder of the libraries in npm's package."""
    found = sorted(folder.glob("**/libggml-vulkan.so"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        _run(["npm", "pack", "--silent", NPM_PACKAGE], folder)
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        found = sorted(folder.glob("**/libggml-vulkan.so"))
    return found[0].parent


def _binding_folder(folder: Path, built: Path) -> Path:
    """Return a folder whose libllama.so has every function of the binding, and which loads its own backends.

    Functions that the build lacks abort when they are called; edgelm calls none of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for library in built.glob("*.so*"):
        link = folder / library.name
        if library.name not in (*ABSENT, "libllama.so") and not link.exists():
            link.symlink_to(library)
    llama = next(path for path in sorted(built.glob("libllama*.so*")) if "common" not in path.name)
    ggml = next(path for path in sorted(built.glob("libggml*.so*")) if "-" not in path.name)
    real = folder / (llama.name if llama.name != "libllama.so" else "libllama-real.so")
    if not real.exists():
        real.symlink_to(llama)
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    binding = (Path(spec.origin).parent / "llama_cpp.py").read_text(encoding="utf-8")
    wanted = set(re.findall(r'@ctypes_function\(\s*"(llama_\w+)"', binding))
    symbols = _run(["nm", "-D", "--defined-only", str(llama)], folder)
    missing = sorted(wanted - {line.split()[-1].partition("@")[0] for line in symbols.splitlines()})
    source = folder / "shim.c"
    source.write_text(SHIM.format(missing="\n".join(f"void {name}(void) {{ abort(); }}" for name in missing)))
    _run(
        [
            os.environ.get("CC", "cc"),
            "-shared",
            "-fPIC",
            "-o",
            "libllama.so",
            "shim.c",
            "-L.",
            "-Wl,--no-as-needed",
            *(f"-l:{path.name}" for path in (real, ggml)),
            "-l:libggml-base.so",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,--allow-shlib-undefined",
        ],
        folder,
    )
    return folder


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S).stdout


if __name__ == "__main__":
    sys.exit(main())
