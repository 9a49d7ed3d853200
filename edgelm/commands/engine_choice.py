"""Which engine a model will get on this machine, for the commands that only show it.

Owns asking the child that chooses (edgelm/build/asking.py), and its death.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgelm.config import Settings
from edgelm.errors import EdgeLMError
from edgelm.executors.cuda_state import CudaState

TIME_LIMIT_S = 120
ASK = ("-P", "-m", "edgelm.build.asking")  # -P: nothing of the current folder
ASK_CUDA = ("-P", "-m", "edgelm.executors.cuda")


@dataclass(frozen=True, slots=True)
class Shown:
    """The choice, and the GPU where it is one."""

    engine: str
    device: str
    reasons: tuple[str, ...]
    cuda: CudaState | None


def ask_choice(path: Path, settings: Settings) -> Shown:
    """Return what would be chosen. Raises EdgeLMError where nothing can run the model."""
    said = _ask(ASK, json.dumps({"model": str(path), "settings": asdict(settings)}) + "\n")
    if "error" in said:
        raise EdgeLMError(str(said["error"]), str(said["hint"]))
    cuda = said["cuda"]
    return Shown(said["engine"], said["device"], tuple(said["reasons"]), CudaState(**cuda) if cuda else None)


def ask_cuda() -> CudaState:
    """Return what our kernels would find. Raises EdgeLMError where the question itself fails."""
    return CudaState(**_ask(ASK_CUDA, ""))


def _ask(arguments: tuple[str, ...], job: str) -> dict[str, Any]:
    try:
        child = subprocess.run(
            [sys.executable, *arguments],
            input=job,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EdgeLMError(f"the engines could not be asked: {type(error).__name__}") from None
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        last = (child.stderr.strip().splitlines() or [f"it ended with {child.returncode}"])[-1]
        raise EdgeLMError(f"the engines could not be asked: {last}", "see `edgelm doctor`")
    said: dict[str, Any] = json.loads(lines[-1])
    return said
