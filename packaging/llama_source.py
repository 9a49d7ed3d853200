"""Corrects the AMX kernels in llama.cpp's source before it is compiled, the same way in both of our builds.

Owns the corrections, and the versions of the two files that they are for. Uses the standard library only.

    python packaging/llama_source.py FOLDER    # of an unpacked llama-cpp-python

1. `ldtilecfg` reads 64 bytes, but GCC before 14 takes it to read 8, and drops the stores to the others on the stack.
   The configuration is read-only data here.
2. A thread asks the kernel for the permission to use tiles before its first one. llama.cpp asks once, while it loads.
3. GCC does not know that `tileloadd` reads memory, and may write the tile after it. A barrier comes between the two.
4. EDGELM_NO_AMX in the environment switches AMX off, and nothing else: without it llama.cpp uses its AVX-512 kernels.

llama.cpp's pull request 26954 names the first two causes.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

FOLDER = Path("vendor/llama.cpp/ggml/src/ggml-cpu/amx")
MARK = "// Corrected by edgelm (packaging/llama_source.py).\n"
NUM_LOADS = 23

CONFIGURE = """\
// What the caller has written to `tile` is in memory after this.
ALWAYS_INLINE const void * edgelm_written(const void * tile) {
#if defined(__GNUC__)
    __asm__ volatile("" : "+r"(tile) : : "memory");
#endif
    return tile;
}

// Tiles 0 and 1 hold B, 2 and 3 A, 4 to 7 C.
alignas(64) static constexpr tile_config_t edgelm_tile_config = {
    1, 0, {}, {64, 64, 32, 32, 64, 64, 64, 64}, {8, 8, 16, 16, 16, 16, 16, 16},
};
static_assert(sizeof(tile_config_t) == 64, "what ldtilecfg reads");

inline void ggml_tile_config_init(void) {
    static thread_local bool done = false;
    if (done) {
        return;
    }
#if defined(SYS_arch_prctl)
    constexpr long request_permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, request_permission, tile_data)) {
        GGML_ABORT("the kernel refuses AMX to this thread");
    }
#endif
    _tile_loadconfig(edgelm_written(&edgelm_tile_config));
    done = true;
}
"""
SWITCH = """\
static bool ggml_amx_init() {
    if (getenv("EDGELM_NO_AMX")) {
        return false;
    }
"""


class SourceError(Exception):
    """The source is not the one that the corrections are for."""


def correct_kernels(text: str) -> str:
    """Return mmq.cpp with a configuration that is read-only data, and with barriers before the tile loads."""
    start = text.index("inline void ggml_tile_config_init(void) {\n")
    end = text.index("\n}\n", start) + len("\n}\n")
    text, count = re.subn(
        r"_tile_loadd\((TMM\d), (.+), (TILE_\w(?: \* VNNI_BLK)?|lda)\);",
        r"_tile_loadd(\1, edgelm_written(\2), \3);",
        text[:start] + CONFIGURE + text[end:],
    )
    assert count == NUM_LOADS == text.count("_tile_loadd(")
    return text


def add_switch(text: str) -> str:
    """Return amx.cpp with the switch EDGELM_NO_AMX."""
    before = SWITCH.splitlines(keepends=True)[0]
    assert text.count(before) == 1
    return text.replace(before, SWITCH)


# The SHA-256 of a file before its correction. For another release: read what has changed there, then change the digest.
CORRECTIONS: dict[str, tuple[str, Callable[[str], str]]] = {
    "mmq.cpp": ("0f95c80e0300eca3b3a3df07272042fee708425e19cd5f2c4cba7b253b26d226", correct_kernels),
    "amx.cpp": ("636d1e4b858a86ad6568100bbdb4bf9715d9dfb25d3831415d55e04e39acad86", add_switch),
}


def correct(source: Path) -> None:
    """Correct an unpacked llama-cpp-python; twice does no harm. Raises SourceError for another source."""
    corrected = {}
    for name, (digest, correction) in CORRECTIONS.items():
        path = source / FOLDER / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceError(f"no source of llama.cpp's AMX kernels: {path}: {error.strerror}") from error
        if data.startswith(MARK.encode()):
            continue
        if hashlib.sha256(data).hexdigest() != digest:
            raise SourceError(f"{path} is not the file that packaging/llama_source.py corrects: compare the two")
        corrected[path] = MARK + correction(data.decode("utf-8"))
    for path, text in corrected.items():
        path.write_text(text, encoding="utf-8")


def main() -> int:
    """Correct the source in the folder that the command line names; return the exit code."""
    try:
        correct(Path(sys.argv[1]))
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
