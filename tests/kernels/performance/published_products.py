"""Published timings of matrix products and attention on tensor cores.

Owns those points.
"""

from __future__ import annotations

from functools import partial

import torch

from tests.kernels.performance import published_builds as builds
from tests.kernels.performance.published import Point
from tests.kernels.performance.published_gpus import GPUS

LAB = "https://github.com/v1olegrace/triton-kernel-lab/tree/main/results/nvidia_geforce_rtx_4060"
LAB_PRODUCTS = LAB.replace("main", "6880c4df4a9f52dba9ab214f7d454829334fd61f")
DEEP = "https://github.com/vllm-project/vllm/blob/main/benchmarks/kernels/deepgemm/README.md"
LAB_NOTE = "our own version; the GPU's clock was 2.6 to 2.7 GHz"
TUNED = [  # BM, BN, BK, GROUP, warps, stages: most of what Triton's tutorial chooses among
    (128, 256, 64, 8, 8, 3), (64, 256, 32, 8, 4, 4), (128, 128, 32, 8, 4, 4), (128, 64, 32, 8, 4, 4),
    (64, 32, 32, 8, 2, 5), (32, 64, 32, 8, 2, 5),
]  # fmt: skip
ATTENTION = [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3)]  # queries and keys of a step, warps, stages: the same


def candidates(side: int, programs: int, itemsize: int, memory: int) -> list[tuple[int, int, int, int, int, int]]:
    """Return the three tiles of the tuner that fit into the shared memory and fill the GPU best, the largest first."""
    fitting = [tile for tile in TUNED if (tile[0] + tile[1]) * tile[2] * tile[5] * itemsize <= memory]
    full = [tile for tile in fitting if builds.blocks(side, tile[0]) * builds.blocks(side, tile[1]) >= programs]
    return (full or fitting[-3:])[:3]


def points() -> list[Point]:
    return [*_tuned_products(), *_lab_products(), *_scaled_products(), *_attention(), *_decoding()]


def _tuned_products() -> list[Point]:
    """Triton's tutorial, the configuration chosen by its tuner; calls that the host bounds are left out."""
    found = []
    issues = "https://github.com/triton-lang/triton/issues"
    note = "the tuner's choice is not said"
    for gpu, issue, kind, note_of, cases in [
        (
            "A100", 7085, "fp16", f"{note}; Triton 3.2",
            [(256, 3.64), (512, 23.83), (768, 58.98), (1024, 97.54)],
        ),
        (
            "A100", 6523, "fp16", f"{note}; Triton 3.5.1",
            [(2688, 158.054404), (2944, 170.088852)],
        ),
        (
            "A100", 5433, "tf32", f"{note}; the GPU is not said: cuBLAS's rates in fp32 are an A100's",
            [(512, 18.724571), (1024, 52.428801), (2048, 92.182504)],
        ),
        (
            "A100 PCIe", 2491, "fp32", f"{note}; a Triton of 2023",
            [(1024, 12.336188), (3072, 17.489763)],
        ),
        (
            "RTX 3090", 319, "fp16", f"{note}; a Triton of 2021",
            [(512, 26.21), (1024, 52.43), (1152, 67.86), (1664, 60.80)],
        ),
        ("H100", 3672, "fp16", f"{note}; SXM or PCIe is not said", [(2944, 471.402029)]),
    ]:  # fmt: skip
        capability = GPUS[gpu].capability
        type_of = torch.float16 if kind == "fp16" else torch.float32
        memory = (99 if capability == 86 else 163) * 1024
        for side, rate in cases:
            first, *others = [
                partial(builds.matmul, capability, (side, side, side), tile, type_of, tf32=kind == "tf32")
                for tile in candidates(side, GPUS[gpu].num_sms, type_of.itemsize, memory)
            ]
            work, limit = 2 * side**3, "half" if kind == "fp16" else kind
            point = Point(
                f"matmul {kind} {side}", gpu, work / rate / 1e6, f"{issues}/{issue}", first, "events",
                f"{rate} TFLOPS", 3 * type_of.itemsize * side**2, work, limit, note_of, others=tuple(others),
            )  # fmt: skip
            found.append(point)
    return found


def _lab_products() -> list[Point]:
    """The source's kernel since it is compiled for rows without gaps, as ours is; before, it took up to 1.8 times."""
    found = []
    for half, side, us, tile in [
        (False, 512, 17.536, (64, 64, 32, 1, 4, 5)), (False, 1024, 80.896, (64, 64, 32, 1, 4, 4)),
        (False, 2048, 556.96, (64, 64, 32, 1, 4, 3)), (False, 4096, 4293.6, (128, 128, 32, 8, 4, 4)),
        (True, 512, 14.336, (128, 128, 32, 8, 8, 6)), (True, 1024, 56.384, (128, 128, 32, 8, 8, 4)),
        (True, 2048, 323.58, (128, 128, 32, 8, 8, 4)), (True, 4096, 2916.86, (128, 128, 32, 8, 8, 5)),
    ]:  # fmt: skip
        build = partial(builds.matmul, 89, (side, side, side), tile, half_sum=half)
        name, limit = f"matmul fp16{', sums in fp16' if half else ''} {side}", "half sum" if half else "half"
        point = Point(
            name, "RTX 4060", us, LAB_PRODUCTS, build, "events", f"{us / 1e3} ms", 6 * side**2, 2 * side**3, limit,
            LAB_NOTE,
        )  # fmt: skip
        found.append(point)
    return found


def _scaled_products() -> list[Point]:
    found = []
    note = "our own version, with vLLM's tile where it has none for the shape; the same operands at each call"
    for m, n, us in [
        (8, 18432, 113.2), (64, 18432, 119.5), (128, 18432, 229.5), (1024, 18432, 897.8),
        (1024, 4096, 242.3), (2048, 4096, 463.0), (4096, 4096, 901.8),
    ]:  # fmt: skip
        k = 7168
        kept = n == 4096  # 29 MB stay in the L2 cache from call to call, 132 MB do not
        build = partial(builds.scaled_matmul, 90, (m, n, k), warm_weights=kept)
        point = Point(
            f"matmul fp8 in blocks {m} x {n} x {k}", "H100", us, DEEP, build, "loop", f"{us} us",
            0 if kept else n * k, 2 * m * n * k, "fp8", note,
        )  # fmt: skip
        found.append(point)
    return found


def _attention() -> list[Point]:
    found = []
    for length, us, tile in [
        (512, 56.32, (64, 64, 4, 3)), (1024, 126.98, (64, 32, 4, 2)), (2048, 401.6, (64, 32, 4, 2)),
        (4096, 1468.98, (64, 32, 4, 2)), (8192, 5494.8, (128, 64, 4, 2)),
    ]:  # fmt: skip
        build = partial(builds.attention, 89, 16, length, 64, causal=True, tile=tile)
        point = Point(
            f"causal attention fp16 16 heads x {length} x 64", "RTX 4060", us, LAB, build, "events", f"{us} us",
            8 * 16 * length * 64, 2 * 16 * length**2 * 64, note=LAB_NOTE,
        )  # fmt: skip
        found.append(point)

    unsure = "our own version, with pointers, not descriptors; the tuner's choice is not said"
    for gpu, source, note, heads, width, cases in [
        (
            "H100", "https://github.com/facebookexperimental/triton/pull/206",
            f"{unsure}; of the GPU only Hopper is said", 128, 128,
            [(1024, 406.8), (4096, 459.6), (16384, 487.0)],
        ),
        (
            "H100 PCIe", "https://github.com/Dao-AILab/flash-attention/issues/1777", unsure, 512, 64,
            [(1024, 230.0), (8192, 248.0)],
        ),
    ]:  # fmt: skip
        for length, rate in cases:
            first, *others = [
                partial(builds.attention, 90, heads, length, width, causal=False, tile=tile) for tile in ATTENTION
            ]
            work = 4 * heads * length**2 * width
            point = Point(
                f"attention fp16 {heads} heads x {length} x {width}", gpu, work / rate / 1e6, source, first, "events",
                f"{rate} TFLOPS", 8 * heads * length * width, work, note=note, others=tuple(others),
            )  # fmt: skip
            found.append(point)
    return found


def _decoding() -> list[Point]:
    """Attention of one new token to a cache in pages, for which the GPU has too few programs."""
    found = []
    source = "https://github.com/Wenyueh/MinivLLM/pull/93"
    note = "our own version; the host needs about 20 us for a launch; keys and values stay in the L2 cache"
    for rows, length, us, by_token in [
        (1, 128, 65.0, True), (1, 512, 230.0, True), (1, 2048, 916.0, True), (8, 128, 65.0, True),
        (8, 512, 247.0, True), (1, 2048, 57.0, False),
    ]:  # fmt: skip
        build = partial(builds.decode, 89, rows, length, by_token=by_token)
        way = "a token" if by_token else "a block"
        name = f"decode attention by {way}, {rows} x 16 heads x {length}"
        point = Point(name, "RTX 4090", us, source, build, "loop", f"{us / 1e3} ms", 0, note=note)
        found.append(point)
    return found
