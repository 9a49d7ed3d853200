"""The published timings are ones that their GPUs can reach, have a source, and their launches compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.performance.published import Point, points
from tests.kernels.performance.published_gpus import GPUS, PEAKS

ROOT = Path(__file__).resolve().parents[3]
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}  # KiB a program can have
QUICK = [
    "empty kernel", "add fp32 4096", "rms norm bfloat16 2048 x 1024", "matmul fp16, sums in fp16 4096",
    "causal attention fp16 16 heads x 8192 x 64", "4 by 4 bits matmul 1 x 2048 x 8192",
    "NF4 GEMV by permutes, Qwen3 down 8 x 2048 x 768",
]  # fmt: skip


def is_sane(point: Point) -> bool:
    """Return whether the GPU can move the bytes and do the operations in this time, and a kernel can be as short."""
    if point.bytes > GPUS[point.gpu].dram_gbs * 1e3 * point.published_us:
        return False
    return not point.operations or point.operations <= PEAKS[point.gpu][point.kind] * 1e6 * point.published_us


def test_every_point_has_a_source_and_is_within_its_gpus_limits() -> None:
    found = points()
    assert len(found) >= 25
    assert len({point.gpu for point in found}) >= 4
    assert len({(point.gpu, point.name) for point in found}) == len(found)
    for point in found:
        assert point.source.startswith("https://"), point
        assert point.printed, point
        assert point.timing in {"events", "profiler", "graph", "replay", "loop"}, point
        assert 2 < point.published_us < 1e5, point
        assert is_sane(point), point


def test_a_figure_in_the_wrong_unit_is_not_sane() -> None:
    large = [point for point in points() if point.bytes > 1e7 or point.operations > 1e9]
    assert len(large) > 80
    assert not [point.name for point in large if is_sane(point._replace(published_us=point.published_us / 1e3))]


def test_the_launches_compile_for_their_gpus_and_fit_them() -> None:
    pytest.importorskip("triton")
    lines = built(QUICK)
    assert {line["point"] for line in lines} == set(QUICK)
    for line in lines:
        if "missing" in line:
            assert "pip install --no-deps grouped-nf4-gemm" in line["missing"]
            continue
        capability = GPUS[line["gpu"]].capability
        assert set(line["capabilities"]) == {capability}, line
        assert max(line["shared"]) <= SHARED[capability] * 1024, line
        assert min(line["programs"]) >= 1, line
        assert min(line["code"]) > 1000, line


def built(names: list[str]) -> list[dict[str, Any]]:
    """Build the launches of the named points in a child: tests/conftest.py lets Triton interpret here."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.performance.build_published", *names],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]
