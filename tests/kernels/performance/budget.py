"""The budget of a step: its nodes with their simulated times and bounds, the gaps between them, and the sum.

Owns the sums. A kernel of torch (a copy, a choice of rows) is taken for as long as the latency of DRAM twice.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from tests.kernels.performance.estimate import Estimate, Prepared, prepare, simulate
from tests.kernels.performance.gpus import Gpu
from tests.kernels.performance.launch import Launch
from tests.kernels.performance.recording import Node
from tests.kernels.performance.step import Part

SMALL = 1 << 16  # bytes of integers that a kernel may read to know what to do


class Row(NamedTuple):
    """A node of the graph."""

    part: str
    times: int  # in a step
    name: str
    us: float
    estimate: Estimate | None  # None: a kernel of torch
    early: bool = False  # it begins while the node before it still runs
    key: str = ""  # of the launch


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
        return sum(row.times * self.gap_us(row) for row in self.rows) / 1e3

    def gap_us(self, row: Row) -> float:
        """Return the time between the node before and this one."""
        return self.gpu.pdl_gap_us if row.early else self.gpu.graph_gap_us

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
    """Launches that were traced, and simulated on one GPU: layers, and steps, share most of theirs.

    `known` are estimates of an earlier run, by key and GPU.
    """

    def __init__(self, known: Mapping[tuple[str, str], Estimate] = MappingProxyType({})) -> None:
        self._prepared: dict[str, Prepared] = {}
        self._estimates = dict(known)

    def estimate(self, node: Launch | Prepared, key: str, gpu: Gpu) -> Estimate:
        """Return the estimate of a launch, which has a key."""
        if (key, gpu.name) not in self._estimates and key not in self._prepared:
            self._prepared[key] = node if isinstance(node, Prepared) else prepare(node)
        if (key, gpu.name) not in self._estimates:
            self._estimates[key, gpu.name] = simulate(self._prepared[key], gpu)
        return self._estimates[key, gpu.name]


def key_of(node: Launch | Prepared) -> str:
    """Return the key of a launch: its code, grid and arguments. Launches with one key take equally long."""
    launch = _launch_of(node)
    parts = [launch.compiled.hash, launch.grid, sorted(launch.warm)]
    for name, value in launch.args.items():
        if not torch.is_tensor(value):
            parts.append((name, value))
            continue
        # Lengths and block tables decide what a kernel does. Of one that has run, its trace says that.
        small = not value.is_floating_point() and value.numel() * value.element_size() <= SMALL
        numbers = value.tolist() if small and not isinstance(node, Prepared) else None
        parts.append((name, str(value.dtype), tuple(value.shape), numbers))
    if isinstance(node, Prepared):
        parts.append(hashlib.sha256(node.traffic.executed.sum(0).tobytes()).hexdigest())
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


def weights_of(row: Row) -> int:
    """Return how many weights a product reads; 0: the kernel is none."""
    match = re.search(r" (\d+)x(\d+)\b", row.name) if not row.name.startswith("combine") else None
    return int(match[1]) * int(match[2]) if match else 0


def _row(part: Part, node: Node, gpu: Gpu, cache: Cache) -> Row:
    if isinstance(node, str):
        return Row(part.name, part.times, f"torch {node}", gpu.microseconds(2 * gpu.dram_latency), None)
    key = key_of(node)
    estimate = cache.estimate(node, key, gpu)
    return Row(part.name, part.times, _name(node, estimate), estimate.us, estimate, key=key)


def _name(node: Launch | Prepared, estimate: Estimate) -> str:
    """Return the kernel with the shape of its weight, where it has one."""
    launch = _launch_of(node)
    constants = {
        name: value
        for (index,), value in launch.compiled.src.constants.items()
        if (name := launch.compiled.src.fn.arg_names[index]) in ("N", "K", "BITS", "SPLITS")
    }
    shape = f" {constants['N']}x{constants['K']}" if "N" in constants and "K" in constants else ""
    bits = f" {constants['BITS']} bits" if "BITS" in constants else ""
    splits = f" split {constants['SPLITS']}" if constants.get("SPLITS", 1) != 1 else ""
    return f"{estimate.name}{shape}{bits}{splits}"
