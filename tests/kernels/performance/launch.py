"""One launch of a compiled kernel with its arguments, and its place on a GPU: occupancy, waves, bytes in flight.

Owns the word and what follows from the grid and the kernel's resources. Knows nothing of instructions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tests.kernels.performance.gpus import CARVEOUTS_KB, CTA_RESERVED, REGISTER_UNIT, REGISTERS, Gpu


class Launch(NamedTuple):
    """A kernel compiled for one GPU, and what it is launched with.

    `args` has the kernel's parameters by name, constexprs left out: integers, floats and tensors of torch.empty at the
    real shapes. Integers that the kernel reads from memory (block tables, lengths) must have real values. `warm` names
    the tensors that lie in the L2 cache at the start, since the kernel before wrote them; all others come from DRAM.
    """

    compiled: Any  # Triton's CompiledKernel for that GPU's sm; its metadata has num_warps and shared
    grid: tuple[int, int, int]
    args: dict[str, object]
    warm: frozenset[str] = frozenset()
    resident: int | None = None  # CTAs of a multiprocessor, if something else than the kernel limits them

    @property
    def num_ctas(self) -> int:
        return math.prod(self.grid)


class Placement(NamedTuple):
    """How the CTAs of a launch lie on the multiprocessors."""

    resident: int  # CTAs that fit on a multiprocessor together
    limit: str  # what limits them
    most: int  # CTAs that the busiest multiprocessor runs, one after another
    active: int  # multiprocessors that run any
    waves: float  # of all CTAs
    warps: float  # of a multiprocessor, on average over the first wave


def place(launch: Launch, registers: int, gpu: Gpu) -> Placement:
    """Return how a launch lies on a GPU."""
    num_warps, shared = launch.compiled.metadata.num_warps, launch.compiled.metadata.shared
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    limits = {
        "registers": REGISTERS // (per_warp * num_warps),
        "shared memory": gpu.shared_kb * 1024 // (shared + CTA_RESERVED),
        "warps": gpu.max_warps // num_warps,
        "CTAs": gpu.max_ctas,
    }
    if launch.resident is not None:
        limits["the benchmark"] = launch.resident
    limit = min(limits, key=lambda name: limits[name])
    resident = max(1, limits[limit])
    total = launch.num_ctas
    if total <= resident * gpu.num_sms:
        limit = "grid"
    most = -(-total // gpu.num_sms)
    return Placement(
        resident,
        limit,
        most,
        min(total, gpu.num_sms),
        total / (resident * gpu.num_sms),
        min(resident, total / gpu.num_sms) * num_warps,
    )


def l1_bytes(launch: Launch, placement: Placement, gpu: Gpu) -> int:
    """Return the size of a multiprocessor's L1 cache: what the shared memory of its CTAs leaves of both."""
    shared = placement.resident * (launch.compiled.metadata.shared + CTA_RESERVED)
    carveout = next((size for size in CARVEOUTS_KB if size * 1024 >= shared), gpu.shared_kb)
    return (gpu.cache_kb - carveout) * 1024
