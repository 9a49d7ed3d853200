"""No library of the current folder, or of GGML_BACKEND_PATH, is ever loaded: a checkout could hold one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
int ggml_backend_score(void) { return 1000000; }
void * ggml_backend_init(void) { return 0; }
"""
START = "from edgelm.backends.llama.devices import llama_devices; llama_devices()"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_planted_library_is_not_loaded(tmp_path: Path) -> None:
    mark, source = tmp_path / "it-was-loaded", tmp_path / "planted.c"
    source.write_text(PLANTED % mark)
    library = tmp_path / "libggml-cpu-x.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    for name in ("libggml-cpu.so", "libggml-vulkan-x.so", "libggml-blas-x.so", "libllama.so"):
        shutil.copy(library, tmp_path / name)
    environment = os.environ | {"GGML_BACKEND_PATH": str(library)}
    subprocess.run([sys.executable, "-P", "-c", START], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert not mark.exists()
    ctypes.CDLL(str(library))
    assert mark.exists(), "the library is one that would be noticed"
