"""Budgets in a file, one line for each scene on each GPU, so that a later run goes on where another one stopped.

Owns the file and when a line still holds: `digest_of` the sources that it was made from. Launches whose code, arguments
and model have not changed are taken from any line, also of other scenes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.kernels.performance.budget import Budget, Row
from tests.kernels.performance.estimate import Counts, Estimate
from tests.kernels.performance.gpus import GPUS
from tests.kernels.performance.launch import Placement

ROOT = Path(__file__).resolve().parents[3]
HERE = "tests/kernels/performance"
SIMULATION = (  # the time of a launch depends on these, besides the launch
    *(f"{HERE}/{name}.py" for name in ("code", "control", "estimate", "gpus", "launch", "memory", "path", "pipeline")),
    *(f"{HERE}/{name}.py" for name in ("traffic", "units")),
    "tests/kernels/ptx",
)
LAUNCHES = (  # the launches of a step depend on these
    "kernels", "models", "edgelm/backends/torch", "edgelm/sampling", "tests/backends/torch/shape_models.py",
    *(f"{HERE}/{name}.py" for name in ("budget", "recording", "step")),
)  # fmt: skip


class Kept(NamedTuple):
    """A budget with what it was made from."""

    scene: str
    gpu: str
    digest: str  # of all sources
    simulation: str  # digest of those of the simulation
    rows: list[Row]

    @property
    def budget(self) -> Budget:
        return Budget(GPUS[self.gpu], self.rows)


@cache
def digest_of(paths: tuple[str, ...]) -> str:
    """Return the digest of Python files, given by themselves or by their folders, and of Triton's version."""
    from edgelm.kernels.gpu_target import triton_version

    files = [
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    ]
    assert files, paths
    digest = hashlib.sha256(triton_version().encode())
    for file in sorted(files):
        if not file.name.startswith("test_"):
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def simulation_digest() -> str:
    """Return the digest of the performance model."""
    return digest_of(SIMULATION)


def digest() -> str:
    """Return the digest of the performance model and of everything that a step launches."""
    return digest_of((*LAUNCHES, *SIMULATION))


def read(file: Path) -> list[Kept]:
    """Return the lines of a file, which may not exist; of a budget that was made again, only the last one."""
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [Kept(**(line | {"rows": [_row(row) for row in line["rows"]]})) for line in map(json.loads, lines)]
    return list({(one.scene, one.gpu): one for one in kept}.values())


def append(file: Path, kept: Kept) -> None:
    """Add a line to a file, at once: other processes may add theirs."""
    line = json.dumps(kept._asdict() | {"rows": [_plain(row) for row in kept.rows]}) + "\n"
    with file.open("ab", buffering=0) as out:
        out.write(line.encode())


def estimates(kept: Iterable[Kept]) -> Iterator[tuple[tuple[str, str], Estimate]]:
    """Yield what the present model has simulated, by launch and GPU."""
    for one in kept:
        if one.simulation == simulation_digest():
            for row in one.rows:
                if row.estimate is not None:
                    yield (row.key, one.gpu), row.estimate


def _plain(row: Row) -> dict[str, Any]:
    plain = row._asdict()
    if row.estimate is not None:
        plain["estimate"] = row.estimate._asdict() | {
            "placement": row.estimate.placement._asdict(),
            "counts": row.estimate.counts._asdict() | {"mix": {}},  # half of the line, and in no table
        }
    rounded: dict[str, Any] = _rounded(plain)
    return rounded


def _rounded(value: Any) -> Any:
    """Return a value whose floats have the digits that tables show, and more."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return value


def _row(plain: dict[str, Any]) -> Row:
    one = plain["estimate"]
    if one is None:
        return Row(**plain)
    nested = {"placement": Placement(**one["placement"]), "counts": Counts(**one["counts"]), "grid": tuple(one["grid"])}
    return Row(**(plain | {"estimate": Estimate(**(one | nested))}))
