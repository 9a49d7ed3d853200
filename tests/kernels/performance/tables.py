"""The model's results as text.

Owns the columns. Knows nothing of how a figure is computed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.performance.budget import Budget, Row

HEAD = (
    f"{'times':>5} {'kernel':<38} {'us':>7} {'bound':<8} {'of it':>5} {'GB/s':>5} {'CTAs':>5} {'waves':>5} "
    f"{'warps':>5} {'regs':>4} {'shared':>6} {'loop':>4} {'in flight':>9} {'needed':>6} {'s/req':>5} {'instr':>7}"
)


def budget_table(result: Budget) -> str:
    """Return a step as a table: nodes, their sums, and the sums with the gaps between nodes."""
    return "\n".join([HEAD, *_rows(result.rows), *_sums(result)])


def _rows(rows: list[Row]) -> Iterator[str]:
    part = ""
    for row in rows:
        if row.part != part:
            part = row.part
            yield f"-- {part}, {row.times} times" if row.times > 1 else f"-- {part}"
        yield _line(row)


def _line(row: Row) -> str:
    if row.estimate is None:
        return f"{row.times:5d} {row.name:<38} {row.us:7.2f} {'latency':<8}"
    one = row.estimate
    counts, where = one.counts, one.placement
    return (
        f"{row.times:5d} {row.name:<38} {row.us:7.2f} {one.bound:<8} {max(one.use.values()):5.0%} "
        f"{counts.dram_bytes / row.us / 1e3:5.0f} {_product(one.grid):5d} {where.waves:5.2f} {where.warps:5.1f} "
        f"{counts.registers:4d} {counts.shared:6d} {counts.loop:4d} {one.in_flight:9.0f} {one.needed:6.0f} "
        f"{counts.sectors_per_request:5.1f} {counts.warp_instructions / 1e3:6.0f}k"
    )


def _sums(result: Budget) -> Iterator[str]:
    by_part: dict[str, float] = {}
    by_bound: dict[str, float] = {}
    for row in result.rows:
        by_part[row.part] = by_part.get(row.part, 0.0) + row.times * row.us / 1e3
        bound = row.estimate.bound if row.estimate else "latency"
        by_bound[bound] = by_bound.get(bound, 0.0) + row.times * row.us / 1e3
    floor = result.dram_gb / result.gpu.stream_gbs * 1e3
    yield "ms by part: " + ", ".join(f"{name} {value:.3f}" for name, value in by_part.items())
    yield "ms by bound: " + ", ".join(f"{name} {value:.3f}" for name, value in by_bound.items())
    yield (
        f"counted: {result.nodes} nodes, {result.early_nodes} of them with PDL, {result.dram_gb:.3f} GB from DRAM, "
        f"{result.instructions / 1e6:.1f} M instructions of warps"
    )
    yield (
        f"simulated: kernels {result.kernels_ms:.3f} ms + gaps {result.gaps_ms:.3f} ms = {result.step_ms:.3f} ms "
        f"({1e3 / result.step_ms:.0f} steps/s); DRAM alone {floor:.3f} ms ({1e3 / floor:.0f})"
    )


def _product(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2]
