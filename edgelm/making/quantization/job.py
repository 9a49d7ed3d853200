"""The job of the worker that quantizes a GGUF. Imports no native code, so that the parent may make it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgelm.base.config import Settings
from edgelm.making.quantization.recipe import Recipe

WORKER = "edgelm.making.quantization.worker"
NUM_TOKENS = 30_000  # of the text for calibration
IMPORTANCE_LIMIT_S = 240.0  # for them, unless the user asks for a number of tokens, a text or the matrix itself


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeJob:
    """Quantize a GGUF by a recipe. Of a split source, it is the first part."""

    source: Path
    destination: Path
    is_source_temporary: bool = False  # made for this job: the worker removes it where its parent was killed
    recipe: Recipe  # with a budget, only until its types are chosen
    budget: str | None = None  # the size of the new file, by whose types it is made: "4.5GiB", "4.5bpw"
    fits: bool = False  # the budget is what this machine's memory allows
    settings: Settings = field(default_factory=Settings)  # with which the new file is to fit
    output_type: str | None = None  # None: as the rule of the file type says
    embedding_type: str | None = None
    allow_requantize: bool = False
    threads: int = 0  # 0: one for each core
    repack: bool = True  # whether llama.cpp may rearrange the weights for this processor
    measure_importance: bool = False
    may_do_without: bool = False  # where the model cannot be run
    imatrix: Path | None = None  # a file to take instead
    save_imatrix: Path | None = None
    calibration: Path | None = None  # a text; None: the built-in one
    calibration_tokens: int = NUM_TOKENS
    importance_limit_s: float | None = None  # for the run of the model; None: it takes all tokens
    cache: Path | None = None  # a folder for importance matrices
    measurements: Path | None = None  # a folder for the divergences of types

    @property
    def is_automatic(self) -> bool:
        """Whether the types are chosen by the size."""
        return self.fits or self.budget is not None
