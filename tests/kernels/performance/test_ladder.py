"""The ladder: goals are judged by what the budgets say, and a missed one has its reason in counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.kernels.performance.budget import Budget, Row, weights_of
from tests.kernels.performance.gpus import GPUS
from tests.kernels.performance.ladder import band_of, ladder
from tests.kernels.performance.step import SCENES
from tests.kernels.performance.test_kept import COUNTS, ESTIMATE
from tests.kernels.performance.validate import Compared

PLAIN, VERIFY_8, VERIFY_16, BATCH, DEEP = (scene.name for scene in SCENES)
# published times are 1.25 times the simulated ones, and off that by a factor of 1.2
POINTS = [Compared("H100", f"add fp32 {n}", "loop", 12.5 * 1.2**n, 10.0) for n in (-1, 1)]


def budget_of(gpu: str, ms: float, name: str = "decode_kernel 4096x4096 4 bits", dram_bytes: float = 2e6) -> Budget:
    """Return a step of one node that takes `ms` with the gap behind it."""
    us = ms * 1e3 - GPUS[gpu].graph_gap_us
    estimate = ESTIMATE._replace(us=us, counts=COUNTS._replace(dram_bytes=dram_bytes))
    return Budget(GPUS[gpu], [Row("layer", 1, name, us, estimate)])


def lines_of(gpu: str, points: Sequence[Compared] = POINTS, **milliseconds: float) -> list[str]:
    names = {"plain": PLAIN, "eight": VERIFY_8, "sixteen": VERIFY_16, "batch": BATCH}
    budgets = {(names[name], gpu): budget_of(gpu, ms) for name, ms in milliseconds.items()}
    return list(ladder(budgets, [gpu], points))


def line_with(lines: list[str], words: str) -> str:
    (line,) = [line for line in lines if words in line]
    return line


def test_a_goal_is_met_when_the_step_is_short_enough() -> None:
    assert "met, but not in all of the band" in line_with(
        lines_of("H100", plain=2.0), "480 tokens/s"
    )  # 500, 333 to 480
    assert line_with(lines_of("H100", plain=1.3), "480 tokens/s").endswith("met")  # 513 at worst
    missed = lines_of("H100", plain=4.0)
    assert line_with(missed, "480 tokens/s").endswith("missed")
    assert "167 to 240" in line_with(missed, "480 tokens/s")
    slow = [replace(point, published=0.64 * point.published) for point in POINTS]  # 450 stands for 469 to 675
    assert line_with(lines_of("H100", slow, plain=1e3 / 450), "480 tokens/s").endswith("missed, but the band has it")


def test_a_missed_goal_has_counts() -> None:
    lines = lines_of("H100", plain=4.0)
    assert "1 nodes, 0 with PDL, 0.002" in line_with(lines, "DRAM alone needs")
    # 1e6 instructions of 32 lanes for 4096 x 4096 weights
    assert "1.9 instructions a weight, 3000 bytes in flight of 8000" in line_with(lines, "instructions a weight")
    assert "1 x decode_kernel 4096x4096 4 bits 3998.1 us (latency" in line_with(lines, "most above")


def test_steps_of_more_rows_are_compared_with_a_plain_one() -> None:
    lines = lines_of("RTX 4090", plain=5.0, eight=5.4, sixteen=6.5, batch=8.0)
    assert "1.08" in line_with(lines, "verify, 8 rows")
    assert line_with(lines, "verify, 8 rows").endswith("met")
    assert "1.30" in line_with(lines, "verify, 16 rows")
    assert line_with(lines, "verify, 16 rows").endswith("missed")
    assert "+1.500 ms 1 x decode_kernel" in line_with(lines, "6.500 ms for 5.000")
    assert "10.0" in line_with(lines, "16 sequences")
    assert line_with(lines, "16 sequences").endswith("met")


def test_what_was_not_simulated_is_said() -> None:
    assert line_with(lines_of("H200"), "verify, 8 rows").endswith("not run")


@pytest.mark.parametrize(("share", "verdict"), [(0.74, "missed"), (0.76, "met")])
def test_attention_is_judged_by_the_bandwidth_of_the_data_sheet(share: float, verdict: str) -> None:
    gpu = GPUS["H200"]
    dram_bytes = share * gpu.dram_gbs * 1e3 * (1000.0 - gpu.graph_gap_us)
    budgets = {(DEEP, "H200"): budget_of("H200", 1.0, "attend_chunks", dram_bytes)}
    lines = list(ladder(budgets, ["H200"], POINTS))
    assert f"{share:.0%}" in line_with(lines, "attention at least")
    assert line_with(lines, "attention at least").endswith(verdict)


def test_the_band_is_the_error_of_the_points_that_are_judged() -> None:
    lines = [Compared("H100", f"add fp32 {n}", "loop", 10.0, predicted) for n, predicted in ((1, 4.0), (2, 9.0))]
    lines.append(Compared("H100", "empty kernel", "events", 10.0, 1.0))  # a constant was chosen by it
    band = band_of(lines)
    assert band.slower == pytest.approx(1 / 0.6)
    assert band.spread == pytest.approx(1.5)
    assert band.tokens(90.0) == pytest.approx((36.0, 81.0))


def test_each_gpu_has_the_error_of_its_own_points() -> None:
    points = [*POINTS, Compared("H200", "softmax", "loop", 10.0, 5.0)]
    lines = list(ladder({}, ["H100", "H200", "RTX 3090"], points))
    assert line_with(lines, "H100 alone") == "H100 alone, 2 points: 1.25 times, off that by a factor of 1.20"
    assert line_with(lines, "H200 alone") == "H200 alone, 1 point: 2.00 times, off that by a factor of 1.00"
    assert line_with(lines, "RTX 3090 alone") == "RTX 3090 alone: no point"


def test_only_products_have_weights() -> None:
    assert weights_of(Row("layer", 1, "decode_kernel 1024x4096 6 bits split 2", 1.0, None)) == 1024 * 4096
    assert weights_of(Row("layer", 1, "combine_kernel 1024x4096 split 2", 1.0, None)) == 0
    assert weights_of(Row("layer", 1, "attend_chunks", 1.0, None)) == 0
