"""The budget of a step: its nodes with their simulated times and bounds, the gaps between them, and the sum.

Owns the sums. A kernel of torch (a copy, a choice of rows) is taken for as long as the latency of DRAM twice.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.kernels.performance.estimate import Estimate, Prepared, prepare, simulate
from tests.kernels.performance.gpus import Gpu
from tests.kernels.performance.launch import Launch
from tests.kernels.performance.recording import Node
from tests.kernels.performance.step import Part


class Row(NamedTuple):
    """A node of the graph."""

    part: str
    times: int  # in a step
    name: str
    us: float
    estimate: Estimate | None  # None: a kernel of torch
    early: bool = False  # it begins while the node before it still runs


class Budget(NamedTuple):
    """A step on a GPU."""

    gpu: Gpu
    rows: list[Row]

    @property
    def nodes(self) -> int:
        return sum(row.times for row in self.rows)

    @property
    def kernels_ms(self) -> float:
        return sum(row.times * row.us for row in self.rows) / 1e3

    @property
    def gaps_ms(self) -> float:
        """The time between nodes in a graph."""
        gaps = self.gpu.graph_gap_us, self.gpu.pdl_gap_us
        return sum(row.times * gaps[row.early] for row in self.rows) / 1e3

    @property
    def early_nodes(self) -> int:
        """The nodes that are launched with programmatic dependent launch, after a node of ours."""
        return sum(row.times for row in self.rows if row.early)

    @property
    def step_ms(self) -> float:
        return self.kernels_ms + self.gaps_ms

    @property
    def dram_gb(self) -> float:
        return sum(row.times * row.estimate.counts.dram_bytes for row in self.rows if row.estimate) / 1e9

    @property
    def instructions(self) -> float:
        """Instructions of warps."""
        return sum(row.times * row.estimate.counts.warp_instructions for row in self.rows if row.estimate)


class Cache:
    """Launches that were traced, and simulated on one GPU: layers share most of theirs."""

    def __init__(self) -> None:
        self._prepared: dict[str, Prepared] = {}
        self._estimates: dict[tuple[str, str], Estimate] = {}

    def estimate(self, node: Launch | Prepared, gpu: Gpu) -> Estimate:
        """Return the estimate of a launch."""
        launch = node.launch if isinstance(node, Prepared) else node
        key = _key(launch)
        if key not in self._prepared:
            self._prepared[key] = node if isinstance(node, Prepared) else prepare(launch)
        if (key, gpu.name) not in self._estimates:
            self._estimates[key, gpu.name] = simulate(self._prepared[key], gpu)
        return self._estimates[key, gpu.name]


def _key(launch: Launch) -> str:
    parts = [launch.compiled.hash, launch.grid, sorted(launch.warm)]
    for name, value in launch.args.items():
        parts.append((name, tuple(value.shape) if torch.is_tensor(value) else value))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def budget(parts: list[Part], gpu: Gpu, cache: Cache) -> Budget:
    """Return the budget of a step."""
    rows = [_row(part, node, gpu, cache) for part in parts for node in part.nodes]
    early = begin_early([node for part in parts for node in part.nodes])
    return Budget(gpu, [row._replace(early=one) for row, one in zip(rows, early, strict=True)])


def begin_early(nodes: Sequence[Node]) -> list[bool]:
    """Return which nodes begin while the kernel before them still runs.

    Both must be launched so: a kernel of torch neither begins early nor lets the next one do so.
    """
    dependent = [not isinstance(node, str) and bool(_launch_of(node).compiled.metadata.launch_pdl) for node in nodes]
    return [one and before for before, one in itertools.pairwise([False, *dependent])]


def _launch_of(node: Launch | Prepared) -> Launch:
    return node.launch if isinstance(node, Prepared) else node


def _row(part: Part, node: Node, gpu: Gpu, cache: Cache) -> Row:
    if isinstance(node, str):
        return Row(part.name, part.times, f"torch {node}", gpu.microseconds(2 * gpu.dram_latency), None)
    estimate = cache.estimate(node, gpu)
    return Row(part.name, part.times, _name(node, estimate), estimate.us, estimate)


def _name(node: Launch | Prepared, estimate: Estimate) -> str:
    """Return the kernel with the shape of its weight, where it has one."""
    launch = node.launch if isinstance(node, Prepared) else node
    constants = {
        name: value
        for (index,), value in launch.compiled.src.constants.items()
        if (name := launch.compiled.src.fn.arg_names[index]) in ("N", "K", "BITS", "SPLITS")
    }
    shape = f" {constants['N']}x{constants['K']}" if "N" in constants and "K" in constants else ""
    bits = f" {constants['BITS']} bits" if "BITS" in constants else ""
    splits = f" split {constants['SPLITS']}" if constants.get("SPLITS", 1) != 1 else ""
    return f"{estimate.name}{shape}{bits}{splits}"
