"""The performance model as a program. Every figure that it prints is simulated.

python -m tests.kernels.performance budget [--gpus H100 ...] [--scenes 0 1 ...]
python -m tests.kernels.performance validate FILE [--seconds N]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kernels.performance.gpus import GPUS


def budgets(names: Sequence[str], numbers: Sequence[int]) -> None:
    """Print the budget of each scene on each GPU."""
    from tests.kernels.performance.budget import Cache, budget
    from tests.kernels.performance.step import SCENES, record
    from tests.kernels.performance.tables import budget_table

    for number in numbers:
        scene = SCENES[number]
        recorded: dict[tuple[int, int], Any] = {}
        cache = Cache()
        for name in names:
            gpu = GPUS[name]
            kind = (gpu.capability, gpu.num_sms)
            if kind not in recorded:
                recorded[kind] = record(scene, gpu)
            print(f"\n{scene.name}, {scene.kv}, {gpu.name} (simulated)")
            print(budget_table(budget(recorded[kind], gpu, cache)), flush=True)


def validate(kept: Path, seconds: float) -> None:
    """Predict published points, and print the table."""
    from tests.kernels.performance.published import points
    from tests.kernels.performance.published_gpus import GPUS as PUBLISHED
    from tests.kernels.performance.validate import compare_all, read, table

    found = points()
    compare_all(found, PUBLISHED, kept, seconds)
    order = {(point.gpu, point.name): at for at, point in enumerate(found)}
    lines = sorted(read(kept), key=lambda line: order[line.gpu, line.name])
    print("\n".join(table(lines, len(found) - len(lines))))


def main(arguments: Sequence[str] | None = None) -> int:
    assert "TRITON_INTERPRET" not in os.environ, "kernels that are interpreted are not compiled"
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.performance", description="Simulated times.")
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("budget", help="time by kernel of steps of Llama-3.1-8B as Q4_K_M")
    steps.add_argument("--gpus", nargs="+", choices=list(GPUS), default=["H100", "H200", "RTX 4090", "RTX 3090"])
    steps.add_argument("--scenes", nargs="+", type=int, default=range(5))
    points = commands.add_parser("validate", help="predicted and published times")
    points.add_argument("kept", type=Path, help="file of the predictions, which a later run continues")
    points.add_argument("--seconds", type=float, default=1e9, help="begin no more points after this time")
    options = parser.parse_args(arguments)
    if options.command == "validate":
        validate(options.kept, options.seconds)
    if options.command == "budget":
        budgets(options.gpus, options.scenes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
