"""Measured beside simulated on the GPU at hand: each node of a step, whole steps, and llama.cpp's.

Owns which GPU of the model's table is at hand, and the order of the run. Without a GPU, --tiny goes through all of it
on a fake one, and measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from edgelm.backends.torch.timing import time_us
from edgelm.kernels.gpu_target import Target, target_of
from tests.kernels.performance import llama_bench
from tests.kernels.performance.budget import Budget
from tests.kernels.performance.gpus import GPUS, Gpu
from tests.kernels.performance.launched import Arguments, Launched, node_us, sequence_us
from tests.kernels.performance.llama_model import write_llama_8b
from tests.kernels.performance.measured import MeasurePart, lines_of, table
from tests.kernels.performance.simulated import budgets
from tests.kernels.performance.step import SCENES, TINY, Part, Scene, record
from tests.kernels.performance.whole_steps import executor_for, executor_key, step_ms

OTHER_CARDS = re.compile(r"40GB|NVL|PCIe|Laptop|Max-Q")  # of a GPU in the table, with other clocks or memory
DEVICE = torch.device("cuda", 0)


class Step(NamedTuple):
    """A whole step in milliseconds."""

    scene: Scene
    simulated: float | None
    measured: float | None
    llama: float | None
    note: str  # why llama.cpp has no figure


def gpu_of(target: Target) -> Gpu | None:
    """Return the GPU of the table that this one is."""
    for gpu in GPUS.values():
        same = re.search(rf"\b{gpu.name}\b", target.gpu) and not OTHER_CARDS.search(target.gpu)
        if same and (gpu.capability, gpu.num_sms) == (target.capability, target.num_sms):
            return gpu
    return None


def name_here() -> list[str]:
    """Return the name of the GPU at hand in the table; no name, if it is not there."""
    gpu = gpu_of(target_of(DEVICE)) if torch.cuda.is_available() else None
    return [gpu.name] if gpu else []


def run(*, tiny: bool, kept: Path | None, folder: Path, llama_model: Path | None) -> bool:
    """Print all tables; return whether everything that could be measured was."""
    scenes = (TINY,) if tiny else SCENES
    if torch.cuda.is_available():
        target = target_of(DEVICE)
        # simulating here would take the time that is there for measuring
        simulated, problem = simulated_steps(scenes, gpu_of(target), kept, makes=tiny)
        model = None if tiny else partial(_llama_model, folder, llama_model)
        return _run(scenes, target, simulated, problem, model, dry=False)
    if not tiny:
        print("no GPU: nothing can be measured (--tiny goes through all of it on a fake one)")
        return False
    from tests.backends.torch.fake_gpu import FakeGpu

    # before the fake GPU, which would stand in for Triton's
    simulated, problem = simulated_steps(scenes, GPUS["H200"], kept, makes=True)
    with FakeGpu():
        print("a dry run on a fake GPU: all is launched, nothing is measured")
        return _run(scenes, target_of(DEVICE), simulated, problem, None, dry=True)


def simulated_steps(
    scenes: Sequence[Scene], gpu: Gpu | None, kept: Path | None, *, makes: bool
) -> tuple[dict[Scene, Budget], str]:
    """Return the budgets of the scenes on a GPU, and what failed: times can be measured without them."""
    found: dict[Scene, Budget] = {}
    problem = attempt(lambda: found.update(budgets(scenes, [gpu.name] if gpu else [], kept, makes=makes)))
    if gpu and not problem and len(found) < len(scenes):
        problem = f"{len(found)} of {len(scenes)} steps are simulated in time; the next run goes on with the others"
    return found, problem


def _run(
    scenes: Sequence[Scene],
    target: Target,
    simulated: dict[Scene, Budget],
    problem: str,
    llama_model: Callable[[], Path] | None,
    *,
    dry: bool,
) -> bool:
    software = f"driver {target.driver}, torch {target.torch}, triton {target.triton}"
    print(f"{target.gpu}, {target.num_sms} multiprocessors, sm_{target.capability}, {software}")
    if gpu_of(target) is None:
        print(f"{target.gpu} with {target.num_sms} multiprocessors is not in the model's table of GPUs: not simulated")
    problems = {"simulation": problem}
    for scene in scenes:
        problems[f"nodes, {scene.name}"] = attempt(partial(_print_nodes, scene, simulated.get(scene), dry=dry))
    measured: dict[Scene, float] = {}
    print(flush=True)
    for _, group in groupby(sorted(scenes, key=executor_key), executor_key):
        sharing = list(group)
        problems[f"whole steps, {sharing[0].name}"] = attempt(partial(_add_steps, measured, sharing, dry=dry))
    llama = {scene: (ms, note) for scene, ms, note in _llama_steps(scenes, llama_model)}
    steps = [
        Step(scene, simulated[scene].step_ms if scene in simulated else None, measured.get(scene), *llama[scene])
        for scene in scenes
    ]
    failed = [f"failed: {work}: {problem}" for work, problem in problems.items() if problem]
    print("\n".join(["", *step_table(steps), *failed]), flush=True)
    return not failed


def attempt(work: Callable[[], object]) -> str:
    """Do a part of the run; return what failed, since the other parts are measured all the same."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - a compiler and a GPU raise anything
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _print_nodes(scene: Scene, budget: Budget | None, *, dry: bool) -> None:
    print(f"\n{scene.name}, {scene.kv}: measured and simulated", flush=True)
    recorder = Launched()
    parts = record(scene, recorder, DEVICE)
    print("\n".join(table(list(lines_of(budget, parts, _measure(recorder, dry=dry))))), flush=True)


def _measure(recorder: Launched, *, dry: bool) -> MeasurePart:
    def measure(part: Part, read: list[float]) -> Sequence[float | None]:
        calls = [node for node in part.nodes if not isinstance(node, str)]
        if part.name == "sampling":  # its kernels count in memory that the first one clears
            times = list(sequence_us(calls, clock))
        else:
            sizes = [num_bytes for node, num_bytes in zip(part.nodes, read, strict=True) if not isinstance(node, str)]
            times = [
                node_us(call, recorder.cold, num_bytes, DEVICE, clock)
                for call, num_bytes in zip(calls, sizes, strict=True)
            ]
        left = iter(times)
        return [None if isinstance(node, str) or dry else next(left) for node in part.nodes]

    def clock(call: Callable[[Arguments], object], inputs: Sequence[Arguments]) -> float:
        return time_us(call, inputs)

    return measure


def _add_steps(measured: dict[Scene, float], scenes: Sequence[Scene], *, dry: bool) -> None:
    with executor_for(scenes, DEVICE) as executor:
        for scene in scenes:
            milliseconds = step_ms(executor, scene)
            if not dry:
                measured[scene] = milliseconds
                print(f"{scene.name}: {milliseconds:.3f} ms", flush=True)  # the run may end before the table


def _llama_model(folder: Path, given: Path | None) -> Path:
    """Return the model for llama-bench, which is made in a folder if none is given."""
    model = given or folder / "llama-8b-q4_k_m.gguf"
    if given is None and not model.exists():
        write_llama_8b(model)
    return model


def _llama_steps(
    scenes: Sequence[Scene], find_model: Callable[[], Path] | None
) -> Iterator[tuple[Scene, float | None, str]]:
    """Yield llama.cpp's milliseconds of each step, or why there are none; without a model, there are none."""
    program = llama_bench.program()
    problem = "" if program else "no llama-bench: set LLAMA_BENCH, or have it on PATH"
    found: list[Path] = []
    if find_model is None:
        problem = problem or "it is not run beside the tiny model"
    elif program and (problem := attempt(lambda: found.append(find_model()))):
        problem = f"no model for llama-bench, set LLAMA_MODEL: {problem}"
    if problem:
        print(f"\nllama.cpp: not measured: {problem}", flush=True)
        yield from ((scene, None, "") for scene in scenes)
        return
    print(f"\nllama.cpp: {program} with {found[0]}", flush=True)
    for scene, ms, note in llama_bench.steps(scenes, found[0]):
        print(f"{scene.name}: {note or f'{ms:.3f} ms'}", flush=True)
        yield scene, ms, note


def step_table(steps: Sequence[Step]) -> Iterator[str]:
    """Yield whole steps: milliseconds, and tokens a second of a step that decodes."""
    yield (
        f"{'whole steps':<40} {'simulated ms':>13} {'measured ms':>12} {'ratio':>6} {'llama.cpp ms':>12} "
        f"{'ours tok/s':>10} {'llama.cpp tok/s':>15}"
    )
    for scene, simulated, measured, llama, note in steps:
        ratio = f"{measured / simulated:.2f}" if measured and simulated else "-"
        yield (
            f"{scene.name:<40} {_ms(simulated, 'not simulated'):>13} {_ms(measured, 'not measured'):>12} {ratio:>6} "
            f"{_ms(llama, '-'):>12} {_tokens(scene, measured):>10} {_tokens(scene, llama):>15}  {note}".rstrip()
        )


def _ms(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.3f}"


def _tokens(scene: Scene, ms: float | None) -> str:
    return "-" if ms is None or scene.rows > 1 else f"{1e3 * scene.sequences / ms:.0f}"
