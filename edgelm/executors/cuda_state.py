"""What is known about CUDA here, as data: for processes that import no native code.

Owns the words. cuda.py finds them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

INSTALL = "pipx install 'edgelm[cuda]'"


@dataclass(frozen=True, slots=True)
class CudaState:
    """What was found. `problem` is empty where kernels can run on `name`; it continues "CUDA is not used: "."""

    problem: str
    hint: str = ""
    name: str = ""
    free_bytes: int = 0
    total_bytes: int = 0


def has_torch() -> bool:
    """Whether torch can be imported, without doing so."""
    return find_spec("torch") is not None
