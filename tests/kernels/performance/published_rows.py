"""Published timings of kernels that go through memory once or twice: additions, norms, softmax, rotary positions.

Owns those points.
"""

from __future__ import annotations

from functools import partial

import torch

from tests.kernels.performance import published_builds as builds
from tests.kernels.performance.published import Point
from tests.kernels.performance.published_gpus import GPUS

EVENTS_A100 = "the A100's variant is not said: it is faster than the 40 GB one can be"
LIGER = "https://github.com/linkedin/Liger-Kernel/blob/main/benchmark/data/all_benchmark_data.csv"
LIGER_H100 = "https://github.com/linkedin/Liger-Kernel/tree/main/benchmark"
LAB = "https://github.com/v1olegrace/triton-kernel-lab/tree/main/results/nvidia_geforce_rtx_4060"
PROFILING = "https://github.com/XAheli/Kernel-Profiling/blob/main/data_dashboard/data.js"
BASE_H200 = 1.365  # GHz, of the GPU's published specifications
OURS = "our own version of the kernel, from the description of the algorithm"


def points() -> list[Point]:
    return [*_empty(), *_additions(), *_softmax(), *_norms(), *_rotations()]


def _empty() -> list[Point]:
    source = "https://github.com/meta-pytorch/tritonbench/pull/38"
    build = partial(builds.nothing, 90)
    return [Point("empty kernel", "H100", 4.544, source, build, "events", "0.004544 ms", 0)]


def _additions() -> list[Point]:
    found = []
    source = "https://github.com/triton-lang/triton/pull/3894"
    for count, rate in [
        (4096, 6.481013), (65536, 113.777778), (1048576, 768.0), (16777216, 1546.572), (134217728, 1682.826),
    ]:  # fmt: skip
        build = partial(builds.vector_add, 80, count)
        us, size = 12 * count / rate / 1e3, 12 * count
        point = Point(
            f"add fp32 {count}", "A100", us, source, build, "events", f"{rate} GB/s", size, note=EVENTS_A100
        )  # fmt: skip
        found.append(point)
    for count, us in [(4096, 5.12), (65536, 8.192), (1048576, 57.344), (33554432, 1623.1)]:
        build = partial(builds.vector_add, 89, count)
        note = f"{OURS}; the timer counts in steps of 1.024 us"
        found.append(
            Point(f"add fp32 {count}", "RTX 4060", us, LAB, build, "events", f"{us} us", 12 * count, note=note)
        )
    for kind, count, ms in [(torch.float32, 48 * 12000 * 1536, 2.41), (torch.float16, 64 * 16000 * 2048, 2.85)]:
        size = kind.itemsize
        build = partial(builds.vector_add, 90, count, kind, wide=True)
        name = f"add fp{8 * size} {count}"
        note = f"{OURS}; thousands may be 1000 or 1024 in the shape: 2 %; the profiler sets the base clock"
        found.append(
            Point(
                name,
                "H200",
                ms * 1e3,
                PROFILING,
                build,
                "profiler",
                f"{ms} ms",
                3 * size * count,
                note=note,
                clock_ghz=BASE_H200,
            )
        )
    return found


def _softmax() -> list[Point]:
    found = []

    def add(
        gpu: str, source: str, kind: torch.dtype, passes: int, note: str, cases: list[tuple[int, int, float]]
    ) -> None:
        for rows, columns, us in cases:
            build = partial(builds.softmax, GPUS[gpu].capability, rows, columns, kind, passes)
            name = f"softmax{' two passes' if passes == 2 else ''} {str(kind)[6:]} {rows} x {columns}"
            size = 2 * kind.itemsize * rows * columns
            timing, clock = ("profiler", BASE_H200) if gpu == "H200" else ("events", None)
            found.append(Point(name, gpu, us, source, build, timing, f"{us} us", size, note=note, clock_ghz=clock))

    bench = "https://github.com/pytorch/benchmark/pull/2251"
    note = f"{EVENTS_A100}; {OURS}"
    add("A100", bench, torch.float32, 1, note, [(4096, 256, 15.36), (4096, 384, 17.41), (4096, 512, 20.48)])
    add("RTX 4060", LAB, torch.float16, 1, OURS, [(4096, 128, 23.55), (4096, 1024, 71.68), (4096, 8192, 541.7)])
    add("RTX 4060", LAB, torch.float32, 1, OURS, [(4096, 128, 24.58), (4096, 4096, 539.6)])
    note = f"{OURS}; thousands may be 1000 or 1024 in the shape: 2 %; the profiler sets the base clock"
    cases = [(32 * 2048, 1024, 131.0), (32 * 2048, 4096, 524.9), (32 * 2048, 8192, 1070.0), (32 * 4096, 256, 124.9)]
    add("H200", PROFILING, torch.float32, 2, note, cases)
    for kind, us in [(torch.float32, 1020.0), (torch.bfloat16, 862.2), (torch.float16, 796.8)]:
        add("H200", PROFILING, kind, 2, note, [(64 * 8192, 1024, us)])
    return found


def _norms() -> list[Point]:
    found = []

    def add_rms(
        gpu: str, source: str, rows: int, kind: torch.dtype, stats: bool, note: str, cases: list[tuple[int, float]]
    ) -> None:
        for columns, us in cases:
            warps = 0 if stats else min(max(builds.power_of_2(columns) // 256, 1), 8)
            build = partial(builds.rms_norm, GPUS[gpu].capability, rows, columns, kind, stats, warps)
            size = 2 * kind.itemsize * rows * columns
            name = f"rms norm {str(kind)[6:]} {rows} x {columns}"
            found.append(Point(name, gpu, us, source, build, "events", f"{us} us", size, note=note))

    cases = [(1024, 13.60), (2048, 20.0), (4096, 31.07), (8192, 51.74), (16384, 95.26), (32768, 182.24)]
    add_rms("A100", LIGER, 2048, torch.bfloat16, True, OURS, cases)
    cases = [(1024, 8.672), (2048, 11.744), (4096, 17.696), (8192, 29.056), (16384, 51.104), (32768, 97.312)]
    note = f"{OURS}; rows and type are those of the A100's table: this one does not say"
    source = f"{LIGER_H100}/rms_norm_speed/nvidia_h100_80gb_hbm3/rmsnorm-fwd-speed-benchmark.csv"
    add_rms("H100", source, 2048, torch.bfloat16, True, note, cases)
    cases = [(128, 14.34), (1024, 70.66), (4096, 271.36), (16384, 1076.2)]
    add_rms("RTX 4060", LAB, 4096, torch.float16, False, OURS, cases)

    for columns, us in [(1024, 30.27), (2048, 49.92), (4096, 88.16), (8192, 165.22), (16384, 322.30)]:
        build = partial(builds.layer_norm, 80, 4096, columns)
        name, size = f"layer norm fp32 4096 x {columns}", 8 * 4096 * columns
        found.append(Point(name, "A100", us, LIGER, build, "events", f"{us} us", size, note=OURS))
    return found


def _rotations() -> list[Point]:
    found = []
    source = f"{LIGER_H100}/rope_speed/nvidia_h100_80gb_hbm3/rope-forward-speed-benchmark-total_dim_8192.csv"
    for gpu, address, positions, width, us in [
        ("A100", LIGER, 2048, 16, 11.36),
        ("A100", LIGER, 2048, 64, 20.86),
        ("A100", LIGER, 2048, 256, 59.49),
        ("H100", source, 1024, 256, 29.28),
        ("H100", source, 4096, 256, 88.96),
        ("H100", source, 16384, 256, 332.5),
    ]:
        build = partial(builds.rotate, GPUS[gpu].capability, positions, 32, 8, width)
        size = positions * (2 * 40 + 1) * width * 2  # the heads there and back, half of each table
        name = f"rotary positions bf16 {positions} x (32 + 8) x {width}"
        found.append(Point(name, gpu, us, address, build, "events", f"{us} us", size, note=OURS))
    return found
