"""The corrections of llama.cpp's AMX kernels: what they change, what they refuse, and what a compiler makes of them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from edgelm.base.machine.llama_build import SUPPORTED

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"
PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#define ALWAYS_INLINE __attribute__((always_inline)) inline
#define GGML_ABORT(...) abort()
struct tile_config_t {
    uint8_t palette_id = 0, start_row = 0, reserved_0[14] = {0};
    uint16_t colsb[16] = {0};
    uint8_t rows[16] = {0};
};
%s
static int8_t B[8][64], numbers[2][16][32];
alignas(64) static int8_t A[16][32];
static int32_t C[16][16];
static int bad;

// Not inlined: GCC keeps what is on the stack for the barriers of its caller.
__attribute__((noinline)) static void configure() { ggml_tile_config_init(); }

static void multiply() {
    configure();
    for (int round = 0; round < 2; round++) {
        memcpy(A, numbers[round], sizeof(A));
        _tile_zero(4);
        _tile_loadd(2, edgelm_written(A), 32);
        _tile_loadd(0, edgelm_written(B), 64);
        _tile_dpbssd(4, 2, 0);
        memset(A, 0, sizeof(A));
        _tile_stored(4, C, 64);
        for (int m = 0; m < 16; m++) {
            for (int n = 0; n < 16; n++) {
                int sum = 0;
                for (int k = 0; k < 32; k++) {
                    sum += numbers[round][m][k] * B[k / 4][4 * n + k %% 4];
                }
                bad += sum != C[m][n];
            }
        }
    }
}

int main() {
    for (int i = 0; i < 512; i++) {
        (&B[0][0])[i] = (int8_t) (i * 13);
        (&numbers[0][0][0])[i] = (int8_t) (i * 7);
        (&numbers[1][0][0])[i] = (int8_t) (i * 5 + 1);
    }
    multiply();
    std::thread(multiply).join();
    printf("%%d\\n", bad);
}
"""


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PACKAGING / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


llama_source = load_script("llama_source")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with the places that are corrected, and nothing between them."""
    folder = tmp_path / llama_source.FOLDER
    folder.mkdir(parents=True)
    loads = "    _tile_loadd(TMM0, Tile0, TILE_N * VNNI_BLK);\n    _tile_loadd(TMM2, A[(1)].qs, lda);\n" * 11
    texts = {
        "mmq.cpp": "a\ninline void ggml_tile_config_init(void) {\n    stack();\n}\n\n" + loads
        + "    _tile_loadd(TMM3, Tile23, TILE_K);\n",
        "amx.cpp": "b\nstatic bool ggml_amx_init() {\n    return true;\n}\n",
    }  # fmt: skip
    corrections = {}
    for name, text in texts.items():
        (folder / name).write_text(text)
        corrections[name] = (hashlib.sha256(text.encode()).hexdigest(), llama_source.CORRECTIONS[name][1])
    monkeypatch.setattr(llama_source, "CORRECTIONS", corrections)
    return tmp_path


def texts(source: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((source / llama_source.FOLDER).iterdir())}


def test_each_place_is_corrected_once(source: Path) -> None:
    llama_source.correct(source)
    corrected = texts(source)
    assert "stack()" not in corrected["mmq.cpp"]
    assert corrected["mmq.cpp"].count(llama_source.CONFIGURE) == 1
    assert corrected["mmq.cpp"].count("_tile_loadd(TMM2, edgelm_written(A[(1)].qs), lda);") == 11
    assert corrected["mmq.cpp"].count("edgelm_written(Tile23)") == 1
    assert corrected["amx.cpp"].count('getenv("EDGELM_NO_AMX")') == 1
    llama_source.correct(source)
    assert texts(source) == corrected


@pytest.mark.parametrize("name", ["mmq.cpp", "amx.cpp"])
@pytest.mark.parametrize("change", ["other", "missing"])
def test_another_source_is_refused_and_left_as_it_is(
    source: Path, name: str, change: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = source / llama_source.FOLDER / name
    if change == "other":
        path.write_text(path.read_text() + "\n")
    else:
        path.unlink()
    before = texts(source)
    monkeypatch.setattr(sys, "argv", ["llama_source.py", str(source)])
    assert llama_source.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert name in line
    assert texts(source) == before


def test_the_corrections_are_for_the_pinned_release(tmp_path: Path) -> None:
    cache = load_script("llama_wheel").cache_folder(os.environ)
    sdists = list(cache.glob(f"sdist/*/llama_cpp_python-{SUPPORTED}.tar.gz"))
    if not sdists:
        pytest.skip("the sdist of llama-cpp-python is not in the cache: `make dist` gets it")
    with tarfile.open(sdists[0]) as archive:
        wanted = [member for member in archive if f"/{llama_source.FOLDER}/" in member.name]
        archive.extractall(tmp_path, wanted, filter="data")
    (source,) = tmp_path.iterdir()
    llama_source.correct(source)
    corrected = texts(source)
    assert corrected["mmq.cpp"].count("edgelm_written(") == llama_source.NUM_LOADS + 2
    llama_source.correct(source)
    assert texts(source) == corrected


@pytest.mark.skipif(platform.machine() != "x86_64" or not sys.platform.startswith("linux"), reason="AMX is of x86-64")
def test_tiles_are_configured_and_loaded_as_they_were_written(tmp_path: Path) -> None:
    """Each on a thread of its own, in software where the processor has no AMX."""
    compiler, flags = shutil.which("g++"), ["-O3", "-std=c++17", "-mamx-tile", "-mamx-int8", "-pthread"]
    if not compiler or subprocess.run([compiler, *flags, "-E", "-xc++", os.devnull], check=False).returncode:
        pytest.skip("no g++ that knows AMX")
    emulator, program = tmp_path / "emulator.so", tmp_path / "program"
    (tmp_path / "program.cpp").write_text(PROGRAM % llama_source.CONFIGURE)
    subprocess.run([compiler, *flags, "-o", program, tmp_path / "program.cpp"], check=True)
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", emulator, PACKAGING / "amx_emulator.c"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(emulator)}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "0\n")
