"""The trial of both engines on a GPU, kept as a fact: which one answers a usual request first.

Owns the file, its key and the comparison. jobs/engine_trial.py measures. Imports no native code.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from edgelm import __version__
from edgelm.base.atomic import atomic_json, read_json
from edgelm.base.machine.conditions import installed
from edgelm.base.machine.gpu import nvidia_gpus
from edgelm.base.machine.llama_build import find_build

FORMAT = 1  # of the file, and of what is measured
PACKAGES = ("torch", "triton", "edgelm-llama-cuda", "edgelm-llama-vulkan")
PROMPT, DECODE = 512, 128  # tokens of a usual request
MAX_FILE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one engine; 0: it failed, for `problem`."""

    prompt: float = 0.0
    decode: float = 0.0
    problem: str = ""

    @property
    def request_s(self) -> float:
        """The seconds of a usual request; infinity where the engine failed."""
        return PROMPT / self.prompt + DECODE / self.decode if self.prompt and self.decode else float("inf")


@dataclass(frozen=True, slots=True)
class Trial:
    """The speeds of both engines with the same model on the same GPU."""

    torch: Speed
    llama: Speed

    @property
    def faster(self) -> Literal["torch", "llama"] | None:
        """The engine that answers a usual request first; None: one of them failed."""
        if self.failed:
            return None
        return "torch" if self.torch.request_s < self.llama.request_s else "llama"

    @property
    def failed(self) -> bool:
        return bool(self.torch.problem or self.llama.problem)

    @property
    def line(self) -> str:
        """The result for a person."""
        ours, theirs = (_words(speed) for speed in (self.torch, self.llama))
        found = f"our own kernels: {ours}; llama.cpp: {theirs}"
        if self.failed:
            return f"{found}; that is no comparison, and --engine auto chooses as before"
        return f"{found}; --engine auto takes {'our own kernels' if self.faster == 'torch' else 'llama.cpp'}"


def _words(speed: Speed) -> str:
    if speed.problem:
        return speed.problem
    return f"{speed.prompt:,.0f} tokens/s of a prompt, {speed.decode:,.0f} of an answer"


def kept_trial(cache: Path) -> Trial | None:
    """Return the trial that was made with this GPU, driver and packages; None: there is none."""
    document = read_json(_file(cache), MAX_FILE_BYTES)
    try:
        return Trial(Speed(**document["torch"]), Speed(**document["llama"]))
    except (KeyError, TypeError):
        return None


def keep_trial(cache: Path, trial: Trial) -> None:
    """Keep a trial for this GPU, driver and packages, unless an engine failed: memory may have been short just then."""
    if not trial.failed:
        atomic_json(_file(cache), asdict(trial))


def _file(cache: Path) -> Path:
    """Return the file of a trial here: its name has all that a speed depends on."""
    gpus = [(gpu.name, gpu.driver) for gpu in nvidia_gpus()]
    identity = repr((FORMAT, __version__, gpus, find_build().label, installed(PACKAGES)))
    return cache / "machine" / f"trial-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
