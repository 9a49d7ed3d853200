"""The time of a launch: machine code, traffic, placement and the simulation of the busiest multiprocessor together.

Owns the result and which bound holds. Every figure is simulated.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from tests.kernels.performance.code import Code, code_of
from tests.kernels.performance.gpus import Gpu
from tests.kernels.performance.launch import Launch, Placement, l1_bytes, place
from tests.kernels.performance.memory import Memory
from tests.kernels.performance.path import Path, paths_of
from tests.kernels.performance.pipeline import Multiprocessor, Result
from tests.kernels.performance.traffic import SECTOR, Traffic, run, trace
from tests.kernels.performance.units import Unit

BUSY = 0.8  # of a launch's cycles: a resource that is busy for more bounds it
SIMULATED = 250_000  # instructions of warps: of a longer launch the first CTAs are simulated, and the rest goes on so
WRITE_BACK = 0.5  # of the L2 cache: a launch that writes more leaves nothing of it there for the next


class Counts(NamedTuple):
    """The exact counts of a launch's code and traffic; they do not depend on the GPU's speed."""

    warp_instructions: float  # of the grid
    loop: int  # instructions of the longest innermost loop
    registers: int
    shared: int
    sectors_per_request: float  # of global loads
    conflicts: float  # wavefronts of shared memory for each request, in ideal ones
    dram_bytes: float
    l2_bytes: float
    mix: dict[str, float]  # instructions of a warp, by name


class Estimate(NamedTuple):
    """The simulated time of a launch on a GPU."""

    name: str
    gpu: str
    grid: tuple[int, int, int]
    us: float
    bound: str
    use: dict[str, float]  # by resource: the part of the time that it is busy
    placement: Placement
    counts: Counts
    in_flight: float  # bytes on the way from DRAM to a multiprocessor, on average
    needed: float  # bytes that must be on the way to reach DRAM's rate: latency times rate
    unmatched: list[str]


class Prepared(NamedTuple):
    """The parts of a launch that do not depend on the GPU's speed."""

    launch: Launch
    code: Code
    traffic: Traffic
    paths: list[Path]


def prepare(launch: Launch, *, whole: bool = False) -> Prepared:
    """Disassemble a launch and run some of its CTAs, or all."""
    code, traffic = code_of(launch.compiled), run(launch, launch.num_ctas) if whole else trace(launch)
    return Prepared(launch, code, traffic, paths_of(code, traffic, launch.compiled.metadata.num_warps, launch.warm))


def estimate(launch: Launch, gpu: Gpu, *, flushed: bool = False) -> Estimate:
    """Simulate a launch."""
    return simulate(prepare(launch), gpu, flushed=flushed)


def simulate(prepared: Prepared, gpu: Gpu, *, flushed: bool = False) -> Estimate:
    """Simulate the busiest multiprocessor of a launch.

    With `flushed`, the L2 cache is full of what was written before (a benchmark does this), so what the launch writes
    there drives as much out to DRAM.
    """
    launch, code, traffic, paths = prepared
    placement = place(launch, code.registers, gpu)
    share = _share_of_work(paths, placement, launch.num_ctas)
    memory = Memory(gpu, gpu.l2_rate * share, gpu.dram_rate * share, l1_bytes(launch, placement, gpu))
    to_dram = flushed or _written_bytes(traffic) > WRITE_BACK * gpu.l2_mb * 1e6
    processor = Multiprocessor(gpu, code, paths, memory, to_dram)
    resident = min(placement.resident, placement.most)
    number = _simulated(paths, placement, launch.compiled.metadata.num_warps)
    result = processor.run(iter(_kinds(paths, number)), resident, launch.compiled.metadata.num_warps)
    use = _use(result, memory)
    cycles = result.cycles
    if number < placement.most:
        waves = max(1, number // resident // 2)  # the last ones show how it goes on
        turn = (result.ends[-1] - result.ends[-1 - waves * resident]) / (waves * resident)
        cycles += (placement.most - number) * turn
    bound = max(use, key=lambda name: use[name])
    return Estimate(
        code.name,
        gpu.name,
        launch.grid,
        gpu.microseconds(cycles),
        bound if use[bound] >= BUSY else "latency",
        use,
        placement,
        _counts(prepared),
        result.dram_bytes / result.cycles * gpu.dram_latency,
        gpu.dram_rate / gpu.num_sms * gpu.dram_latency,
        paths[0].unmatched,
    )


def _simulated(paths: list[Path], placement: Placement, num_warps: int) -> int:
    """Return how many CTAs of the busiest multiprocessor are simulated: whole waves, if not all."""
    steps = sum(path.share * len(path.steps) for path in paths) * num_warps
    most, resident = placement.most, placement.resident
    if steps * most <= SIMULATED or most <= 4 * resident:
        return most
    return min(most, max(4, int(SIMULATED / steps) // resident) * resident)


def _kinds(paths: list[Path], number: int) -> list[int]:
    """Return the kinds of the busiest multiprocessor's CTAs: at least one of each kind if there is room, longest first.

    They alternate, as the CTAs of the grid do.
    """
    order = sorted(range(len(paths)), key=lambda at: -len(paths[at].steps))
    wanted = dict.fromkeys(order, 0)
    left = number
    for kind in order[:-1]:
        wanted[kind] = min(left, max(1, round(paths[kind].share * number)))
        left -= wanted[kind]
    wanted[order[-1]] = left
    given = dict.fromkeys(order, 0)
    kinds = []
    for _ in range(number):
        kind = max(order, key=lambda at: (wanted[at] - given[at]) / max(1, wanted[at]))
        given[kind] += 1
        kinds.append(kind)
    return kinds


def _share_of_work(paths: list[Path], placement: Placement, num_ctas: int) -> float:
    """Return the part of the launch's traffic that the busiest multiprocessor has: its part of all bandwidth.

    CTAs without work take none of it. Where the busiest multiprocessor moves nothing, its part is that of instructions.
    """
    kinds = _kinds(paths, placement.most)
    amounts = [_sectors(path) for path in paths]
    if not any(amounts[kind] for kind in kinds):
        amounts = [float(len(path.steps)) for path in paths]
    own = sum(amounts[kind] for kind in kinds)
    return min(1.0, own / (num_ctas * sum(path.share * amount for path, amount in zip(paths, amounts, strict=True))))


def _sectors(path: Path) -> float:
    """Return the sectors that a warp moves between the L1 cache and the rest of the memory."""
    found = [path.requests[at] for at in path.steps if at in path.requests]
    return sum(request.sectors if request.writes else request.misses for request in found)


def _use(result: Result, memory: Memory) -> dict[str, float]:
    cycles = result.cycles
    return {
        "dram": result.dram_bytes / memory.dram_rate / cycles,
        "l2": result.l2_bytes / memory.l2_rate / cycles,
        "l1": result.l1_busy / cycles,
        "issue": result.issue_busy / cycles,
        "alu": result.busy[Unit.ALU] / cycles,
        "fma": result.busy[Unit.FMA] / cycles,
        "xu": result.busy[Unit.XU] / cycles,
        "fp64": result.busy[Unit.FP64] / cycles,
        "tensor": result.busy[Unit.TENSOR] / cycles,
    }


def _written_bytes(traffic: Traffic) -> float:
    scale = traffic.num_ctas / len(traffic.ctas)
    return scale * sum(
        access.sectors * SECTOR for access in traffic.accesses.values() if access.writes and not access.shared
    )


def _counts(prepared: Prepared) -> Counts:
    launch, code, traffic, paths = prepared
    num_warps = launch.compiled.metadata.num_warps
    mix: Counter[str] = Counter()
    for path in paths:
        for name, count in Counter(code.instructions[at].name for at in path.steps).items():
            mix[name] += path.share * count
    loads = [access for access in traffic.accesses.values() if not access.shared and not access.writes]
    shared = [access for access in traffic.accesses.values() if access.shared]
    requests = sum(access.requests for access in loads)
    ideal = sum(max(access.requests, access.num_bytes / 128) for access in shared)
    scale = traffic.num_ctas / len(traffic.ctas)
    innermost = [
        loop for loop in code.loops
        if not any(other != loop and loop.start <= other.start and other.end <= loop.end for other in code.loops)
    ]  # fmt: skip
    return Counts(
        warp_instructions=sum(mix.values()) * num_warps * launch.num_ctas,
        loop=max((loop.end - loop.start + 1 for loop in innermost), default=0),
        registers=code.registers,
        shared=launch.compiled.metadata.shared,
        sectors_per_request=sum(access.sectors for access in loads) / requests if requests else 0.0,
        conflicts=sum(access.wavefronts for access in shared) / ideal if ideal else 1.0,
        dram_bytes=traffic.dram_bytes(launch.warm),
        l2_bytes=scale * SECTOR * sum(access.misses for access in loads),
        mix=dict(mix),
    )
