"""Builds the platform wheel edgelm-llama-vulkan: llama.cpp's Vulkan backend, from the same sdist as edgelm-llama.

Owns the tools that it is compiled with. Prints the wheel's path.

    python packaging/vulkan_library.py [--out dist] [--build FOLDER]

Needs cmake, a C++ compiler, Vulkan's headers, SPIR-V's headers and glslc: those in the folder EDGELM_VULKAN_TOOLS,
which vulkan_tools.sh makes, or else the system's. JOBS sets the number of processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_library import Build, build_and_print
from llama_libraries import plan_build
from llama_wheel import BuildError


def plan_vulkan(sdist: Path, _cache: Path) -> Build:
    """Return the build of this machine. Raises BuildError without the tools, and on a platform without Vulkan wheel."""
    if not sys.platform.startswith("linux"):
        raise BuildError("the Vulkan wheel is for Linux; macOS's wheel of edgelm-llama has Metal")
    compiler = plan_build(sdist, "").compiler
    folder = os.environ.get("EDGELM_VULKAN_TOOLS")
    tools = Path(folder).resolve() if folder else None
    glslc = str(tools / "bin" / "glslc") if tools else "glslc"
    try:
        version = subprocess.run([glslc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"glslc is needed: {error}; packaging/vulkan_tools.sh gets it") from error
    options = {}
    if tools:
        options = {
            "Vulkan_INCLUDE_DIR": str(tools / "usr" / "include"),
            "Vulkan_LIBRARY": str(tools / "libvulkan.so"),
            "Vulkan_GLSLC_EXECUTABLE": glslc,
            "CMAKE_PREFIX_PATH": str(tools / "usr"),
        }
    return Build(sdist, "vulkan", "Vulkan", f"{compiler}\n{version}", options)


if __name__ == "__main__":
    sys.exit(build_and_print("Vulkan", plan_vulkan))
