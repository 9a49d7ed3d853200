"""llama.cpp's libraries, with every variant of its CPU kernels, and llama-cpp-python's low-level binding to them.

`lib_dir()` is the folder of the libraries, `COMMIT` the commit of llama.cpp that they were built from. The binding is
`edgelm_llama.llama_cpp`; its import loads the libraries, but no backend.
"""

from __future__ import annotations

from pathlib import Path

from edgelm_llama.build import BINDING, COMMIT

__all__ = ["BINDING", "COMMIT", "lib_dir"]


def lib_dir() -> Path:
    """Return the folder of the libraries."""
    return Path(__file__).resolve().parent / "lib"
