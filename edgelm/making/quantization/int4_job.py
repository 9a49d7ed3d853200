"""The messages between `edgelm quantize --to int4…` and its worker, and the methods. Imports nothing that is large."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

METHODS = {
    "int4": "plain rounding",
    "int4-awq": "activation-aware scales (AWQ)",
    "int4-gptq": "error compensation (GPTQ)",
}
GROUPS = (32, 64, 128)
SEQUENCES, SEQUENCE_LEN = 128, 512  # of the calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Job:
    """Quantize a folder of safetensors to packed INT4."""

    folder: Path
    out: Path
    method: str
    group: int
    symmetric: bool = True  # without zero points, which transformers with compressed-tensors 0.20 cannot load
    calibration: Path | None = None  # a text; None: the built-in one
    sequences: int = SEQUENCES
    sequence_len: int = SEQUENCE_LEN
    device: str = "auto"  # "cpu": CUDA is not used
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Int4Progress:
    """A layer is being worked on. `layer` counts from 1; `left_s` is unknown during the first one."""

    layer: int
    layers: int
    action: str
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Int4Done:
    """The folder is written."""

    out: Path
    source_bytes: int
    bytes: int
    matrices: int
    tokens: int  # of calibration
    seconds: float
