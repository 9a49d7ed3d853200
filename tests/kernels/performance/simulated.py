"""The budgets of steps on GPUs: from the file that keeps them, or recorded and simulated now.

Owns when a budget is made again. Knows nothing of what is printed of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.kernels.performance import kept
from tests.kernels.performance.budget import Budget, Cache, budget
from tests.kernels.performance.gpus import GPUS
from tests.kernels.performance.kept import Kept
from tests.kernels.performance.recording import Recorded
from tests.kernels.performance.step import Part, Scene, record


def budgets(
    scenes: Sequence[Scene], gpus: Sequence[str], file: Path | None, *, as_kept: bool = False, makes: bool = True
) -> Iterator[tuple[Scene, Budget]]:
    """Yield the budget of each scene on each GPU; those that the file does not have are made now, and added to it.

    Without `makes`, yield those that the file has; with `as_kept`, also those of other kernels.
    """
    lines = kept.read(file) if file else []
    known = dict(kept.estimates(lines))
    found = {(line.scene, line.gpu): line for line in lines if as_kept or line.digest == kept.digest()}
    for scene in scenes:
        recorded: dict[tuple[int, int], list[Part]] = {}
        cache = Cache(known)
        for name in gpus:
            if line := found.get((scene.name, name)):
                yield scene, line.budget
            elif makes and not as_kept:
                result = _made(scene, name, cache, recorded)
                if file is not None:
                    kept.append(file, Kept(scene.name, name, kept.digest(), kept.simulation_digest(), result.rows))
                known |= {(row.key, name): row.estimate for row in result.rows if row.estimate}
                yield scene, result


def _made(scene: Scene, name: str, cache: Cache, recorded: dict[tuple[int, int], list[Part]]) -> Budget:
    """Return a budget that is made now. GPUs with equal multiprocessors, and as many, have equal launches."""
    gpu = GPUS[name]
    kind = (gpu.capability, gpu.num_sms)
    if kind not in recorded:
        recorded[kind] = record(scene, Recorded(gpu))
    return budget(recorded[kind], gpu, cache)
