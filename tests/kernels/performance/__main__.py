"""The performance model as a program.

python -m tests.kernels.performance budget [--gpus H100 ...] [--scenes 0 1 ...] [--kept FILE [--as-kept]]
python -m tests.kernels.performance ladder [--gpus H100 ...] [--kept FILE [--as-kept]]
python -m tests.kernels.performance measure --folder FOLDER [--kept FILE] [--tiny]
python -m tests.kernels.performance validate FILE [--seconds N]

`measure` times the GPU at hand: packaging/gpu_kernels.sh calls it. All other figures are simulated.
FILE keeps what was simulated: a later run goes on with it, and makes anew what has changed. `--as-kept` only prints it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kernels.performance.gpus import GPUS

if TYPE_CHECKING:
    from tests.kernels.performance.step import Scene

HERE = "here"  # the GPU at hand
POINTS = Path(__file__).resolve().parents[3] / "docs/results/performance-model-2026-11-24.jsonl"


def budget(scenes: Sequence[Scene], gpus: Sequence[str], kept: Path | None, *, as_kept: bool) -> None:
    """Print the budget of each scene on each GPU."""
    from tests.kernels.performance.simulated import budgets
    from tests.kernels.performance.tables import budget_table

    for scene, result in budgets(scenes, gpus, kept, as_kept=as_kept):
        print(f"\n{scene.name}, {scene.kv}, {result.gpu.name} (simulated)\n{budget_table(result)}", flush=True)


def ladder(gpus: Sequence[str], kept: Path | None, points: Path, *, as_kept: bool) -> None:
    """Print the goals with the simulated figures."""
    from tests.kernels.performance import ladder
    from tests.kernels.performance.simulated import budgets
    from tests.kernels.performance.step import SCENES
    from tests.kernels.performance.validate import read

    found = {(scene.name, one.gpu.name): one for scene, one in budgets(SCENES, gpus, kept, as_kept=as_kept)}
    print("\n".join(ladder.ladder(found, gpus, read(points))))


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
    options = _parser().parse_args(arguments)
    if options.command == "validate":
        validate(options.kept, options.seconds)
        return 0
    from tests.kernels.performance.step import SCENES, TINY

    if options.command == "measure":
        from tests.kernels.performance.at_hand import run

        done = run(tiny=options.tiny, kept=options.kept, folder=options.folder, llama_model=options.llama_model)
        return 0 if done else 1
    if options.gpus == [HERE]:
        from tests.kernels.performance.at_hand import name_here

        options.gpus = name_here()
    if options.command == "ladder":
        ladder(options.gpus, options.kept, options.points, as_kept=options.as_kept)
    if options.command == "budget":
        scenes = [TINY] if options.tiny else [SCENES[number] for number in options.scenes]
        budget(scenes, options.gpus, options.kept, as_kept=options.as_kept)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.performance", description="Simulated times.")
    commands = parser.add_subparsers(dest="command", required=True)
    steps = commands.add_parser("budget", help="time by kernel of steps of Llama-3.1-8B as Q4_K_M")
    steps.add_argument("--scenes", nargs="+", type=int, default=range(5), help="numbers in SCENES, step.py")
    steps.add_argument("--tiny", action="store_true", help="parts of a step of a tiny model, to try the program")
    goals = commands.add_parser(
        "ladder", help="the goals with simulated figures, and the reasons where they are missed"
    )
    goals.add_argument("--points", type=Path, default=POINTS, help="predictions of published times, for the band")
    for command in (steps, goals):
        command.add_argument(
            "--gpus", nargs="+", choices=[*GPUS, HERE], default=["H100", "H200", "RTX 4090", "RTX 3090"]
        )
        command.add_argument("--kept", type=Path, metavar="FILE", help="the budgets, which a later run continues")
        command.add_argument("--as-kept", action="store_true", help="only print FILE, also of other kernels")
    at_hand = commands.add_parser("measure", help="steps on the GPU at hand, beside the simulated times")
    at_hand.add_argument("--tiny", action="store_true", help="a tiny model; without a GPU a dry run")
    at_hand.add_argument("--kept", type=Path, metavar="FILE", help="the budgets, of `budget --gpus here`")
    at_hand.add_argument("--folder", type=Path, required=True, help="where a model for llama.cpp is made")
    at_hand.add_argument("--llama-model", type=Path, help="a GGUF of Llama-3.1-8B as Q4_K_M, for llama.cpp")
    points = commands.add_parser("validate", help="predicted and published times")
    points.add_argument("kept", type=Path, help="file of the predictions, which a later run continues")
    points.add_argument("--seconds", type=float, default=1e9, help="begin no more points after this time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
