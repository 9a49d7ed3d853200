"""The files of GPU checks: a verdict under a key of all it depends on.

Owns the files, and which verdicts are kept and for how long. Knows nothing of the key, and of how a check is made.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from edgelm.backends.gpu_check import GpuVerdict, OpVerdict
from edgelm.base.atomic import atomic_json, read_json

MAX_FILE_BYTES = 2**20
PROBLEM_S = 24 * 3600.0  # a GPU on which no kernel runs is tried again after that


def kept_verdict(folder: Path, key: str) -> GpuVerdict | None:
    """Return the verdict that was kept; None: there is none, or it is of a problem that may be solved by now."""
    document = read_json(_file(folder, key), MAX_FILE_BYTES)
    try:
        verdicts = tuple(OpVerdict(**verdict) for verdict in document.pop("verdicts"))
        age_s = time.time() - document.pop("made_at", 0.0)
        verdict = GpuVerdict(**document, verdicts=verdicts)
    except (AttributeError, KeyError, TypeError):
        return None
    return None if verdict.problem and not 0 <= age_s < PROBLEM_S else verdict


def keep(folder: Path, key: str, verdict: GpuVerdict) -> None:
    """Keep a verdict for later starts, unless it may be another one then: for a lack of memory, or a hang."""
    if (verdict.lasts or not verdict.problem) and not any(one.unknown for one in verdict.verdicts):
        atomic_json(_file(folder, key), asdict(verdict) | {"made_at": time.time()})


def forget_problems(folder: Path) -> None:
    """Forget the verdicts by which no kernel runs here: a newer check has found otherwise."""
    for path in (folder / "machine").glob("gpu-*.json"):
        document = read_json(path, MAX_FILE_BYTES)
        if isinstance(document, dict) and document.get("problem"):
            path.unlink(missing_ok=True)


def _file(folder: Path, key: str) -> Path:
    return folder / "machine" / f"gpu-{key}.json"
