"""The description of an emulated case, its run, and the list of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.kernels.emulated.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kernels.ptx.launch import Emulated

CAPABILITIES = (80, 86, 89, 90, 120)
OUTSIDE_OF_STEPS = {"trial_kernel", "read_kernel"}  # kernels of no step, which are launched without PDL


class EmulatedCase(NamedTuple):
    """An op on one input. `run` makes the input from a seed, launches the op's kernels and judges the result."""

    op: str  # its folder in kernels/
    format: str  # of the weight, or the type of the rows
    rows: int
    detail: str  # what distinguishes it from the op's other cases
    run: Callable[[int], Outcome]
    kv: str = ""  # the format of the cache
    main: tuple[int, ...] = ()  # the architectures for which every test run emulates it; the rest runs with --soak

    @property
    def name(self) -> str:
        parts = (self.op, self.format, self.kv and f"kv={self.kv}", f"rows={self.rows}", self.detail)
        return " ".join(part for part in parts if part)


class Result(NamedTuple):
    """The outcome of a case for one architecture, and what was launched."""

    case: EmulatedCase
    capability: int
    outcome: Outcome
    kernels: tuple[str, ...]
    launches: int
    replayed: int  # launches of them that were equal to earlier ones and did not run again
    instructions: int  # that ran, once for all threads that run together
    seconds: float


def emulate(case: EmulatedCase, capability: int, seed: int, **options: Any) -> Result:
    """Run a case on an emulated GPU; `options` are those of `Emulated`. An error of the emulator is a fault."""
    from tests.kernels.ptx.errors import EmulatorError
    from tests.kernels.ptx.launch import Emulated

    began = time.perf_counter()
    with Emulated(capability, **options) as gpu, filled_memory():
        try:
            outcome = case.run(seed)
        except EmulatorError as error:
            outcome = Outcome(float("inf"), 0.0, f"{type(error).__name__}: {error}")
    if late := launched_late(gpu):
        outcome = Outcome(float("inf"), 0.0, f"launched without PDL: {', '.join(late)}")
    kernels = tuple(dict.fromkeys(launch.kernel for launch in gpu.launches))
    ran = [launch.instructions for launch in gpu.launches if not launch.replayed]
    num_replayed = len(gpu.launches) - len(ran)
    seconds = time.perf_counter() - began
    return Result(case, capability, outcome, kernels, len(gpu.launches), num_replayed, sum(ran), seconds)


def launched_late(gpu: Emulated) -> list[str]:
    """Return the kernels that were launched without programmatic dependent launch, though the GPU has it."""
    if gpu.capability < 90:
        return []
    late = (launch.kernel for launch in gpu.launches if not launch.dependent)
    return sorted({*late} - OUTSIDE_OF_STEPS)


@contextmanager
def filled_memory() -> Iterator[None]:
    """Fill new memory with NaN, or with the largest integer: what a kernel does not write is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def all_cases() -> list[EmulatedCase]:
    """Return all cases, op by op. They import the kernels: TRITON_INTERPRET must not be set."""
    from tests.kernels.emulated import cache_cases, row_cases, weight_cases

    cases = [*weight_cases.cases(), *cache_cases.cases(), *row_cases.cases()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in set(names) if names.count(name) > 1)
    return cases
