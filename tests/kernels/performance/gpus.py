"""The GPUs of the model: one table of published numbers, each with its source.

Owns the numbers. `ASSUMED` names those without a publication. Clock cycles are of the boost clock.

Sources:
 [nv] the vendor's whitepapers of A100, GA102, AD102, H100 and GB202, and the data sheet of the H200; multiprocessors,
    clocks, bandwidths, sizes and rates of tensor cores. A rate in products a cycle is derived: TFLOPS / clock / SMs.
 [guide] CUDA C++ programming guide: throughput of native arithmetic instructions, limits of a multiprocessor.
 [benches] github.com/te42kyfo/gpu-benches (Erlangen), files gpu-latency, cuda-latency, gpu-l2-cache, gpu-stream,
    gpu-small-kernels: A100-80, H100 PCIe, H200, L40. Latencies are in cycles there. L2 latency is the mean of the near
    and the far partition where there are two: 211 and 424 on the A100, 265 and 475 on the H100.
 [hopper] Luo and others, "Benchmarking and dissecting the Nvidia Hopper GPU architecture", arXiv 2402.13499: latency of
    shared memory; mma reaches 62.9 % of the peak on an H100.
 [clpeak] github.com/krrishnarraj/clpeak issues 104 (RTX 3090: 856 GB/s) and 106 (RTX 4090: 921 GB/s).
 [add] two published points of Triton's vector add on an H200 (published_rows.py): 10.6 GB in 2,410 us and 12.6 GB in
    2,850 us; gpu-benches has 3,888 GB/s for the same GPU.
 [torchrec] github.com/meta-pytorch/torchrec pull 4634: a Triton stream reads 90.8 % of an H100's 3.35 TB/s.
"""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    capability: int
    num_sms: int  # [nv]
    clock_ghz: float  # boost [nv]
    dram_gbs: float  # of the data sheet [nv]
    stream_gbs: float  # that a read-only stream reaches
    l2_mb: float  # [nv]
    l2_gbs: float  # that reads reach
    l1_latency: int
    l2_latency: int
    dram_latency: int
    shared_latency: int  # [hopper]
    shared_kb: int  # of a multiprocessor [guide]
    cache_kb: int  # L1 cache and shared memory of a multiprocessor together [guide]
    max_warps: int  # of a multiprocessor [guide]
    max_ctas: int  # [guide]
    alu_lanes: int  # of a scheduler: integers, logic, comparisons [guide]
    fp32_lanes: int  # [guide]
    half2_lanes: int  # [guide]
    fp64_lanes: float  # [guide]
    tensor_macs: float  # 16-bit products a cycle and scheduler with mma.sync, summed in float32
    tensor_macs_group: float  # the same with wgmma
    tensor_macs_int8: float
    stream_gap_us: float  # between the end of a kernel and the start of the next, launched ahead in a stream
    graph_gap_us: float  # the same between two nodes of a graph
    pdl_gap_us: float  # the same with programmatic dependent launch

    def cycles(self, microseconds: float) -> float:
        return microseconds * self.clock_ghz * 1e3

    def microseconds(self, cycles: float) -> float:
        return cycles / self.clock_ghz / 1e3

    @property
    def dram_rate(self) -> float:
        """Bytes a cycle, of the whole GPU."""
        return self.stream_gbs / self.clock_ghz

    @property
    def l2_rate(self) -> float:
        """Bytes a cycle, of the whole GPU."""
        return self.l2_gbs / self.clock_ghz


SCHEDULERS = 4  # of a multiprocessor [nv]
REGISTERS = 65536  # of a multiprocessor [guide]
L1_RATE = 128  # bytes a cycle and multiprocessor, of the L1 cache and of shared memory [nv]
PORT_RATE = 64  # bytes a cycle from the L2 cache to a multiprocessor [nv]: A100 whitepaper
CTA_RESERVED = 1024  # bytes of shared memory that the system takes of each CTA [guide], sm_80 and later
CARVEOUTS_KB = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)  # that shared memory may have [guide]; the rest is L1 cache
REGISTER_UNIT = 256  # registers that a warp's are rounded up to [guide]

# Calibrated on three published points: one CTA of 32 threads after another, which reads 8 bytes a thread (gpu-stream,
# column "read": H200 549 ns, A100 682 ns, L40 446 ns a turn). With this value they are 1 % too long on average.
CTA_TURN = 280  # cycles from the end of a CTA to the first instruction of the next one in its place

A100 = Gpu(
    "A100", 80, 108, 1.41, 2039, 1865, 40, 5400, 36, 317, 570, 29, 164, 192, 64, 32,
    alu_lanes=16, fp32_lanes=16, half2_lanes=32, fp64_lanes=8, tensor_macs=256, tensor_macs_group=256,
    tensor_macs_int8=512, stream_gap_us=1.5, graph_gap_us=1.0, pdl_gap_us=1.0,
)  # fmt: skip
RTX_3090 = Gpu(
    "RTX 3090", 86, 82, 1.695, 936, 856, 6, 2000, 36, 250, 560, 29, 100, 128, 48, 16,
    alu_lanes=16, fp32_lanes=32, half2_lanes=32, fp64_lanes=0.5, tensor_macs=64, tensor_macs_group=64,
    tensor_macs_int8=256, stream_gap_us=1.5, graph_gap_us=0.8, pdl_gap_us=0.8,
)  # fmt: skip
RTX_4090 = Gpu(
    "RTX 4090", 89, 128, 2.52, 1008, 921, 72, 5200, 36, 277, 632, 30, 100, 128, 48, 24,
    alu_lanes=16, fp32_lanes=32, half2_lanes=32, fp64_lanes=0.5, tensor_macs=64, tensor_macs_group=64,
    tensor_macs_int8=256, stream_gap_us=1.5, graph_gap_us=0.7, pdl_gap_us=0.7,
)  # fmt: skip
RTX_5090 = Gpu(
    "RTX 5090", 120, 170, 2.407, 1792, 1640, 96, 6500, 36, 300, 650, 30, 100, 128, 48, 24,
    alu_lanes=32, fp32_lanes=32, half2_lanes=32, fp64_lanes=0.5, tensor_macs=64, tensor_macs_group=64,
    tensor_macs_int8=256, stream_gap_us=1.5, graph_gap_us=0.7, pdl_gap_us=0.5,
)  # fmt: skip
H100 = Gpu(
    "H100", 90, 132, 1.83, 3352, 3044, 50, 8000, 34, 370, 650, 29, 228, 256, 64, 32,
    alu_lanes=16, fp32_lanes=32, half2_lanes=32, fp64_lanes=16, tensor_macs=322, tensor_macs_group=512,
    tensor_macs_int8=644, stream_gap_us=1.8, graph_gap_us=1.9, pdl_gap_us=0.8,
)  # fmt: skip
H200 = H100._replace(name="H200", dram_gbs=4800, stream_gbs=4400, l2_gbs=9700)

GPUS = {gpu.name: gpu for gpu in (A100, RTX_3090, RTX_4090, RTX_5090, H100, H200)}

# What has no publication, or is derived from one of another GPU.
ASSUMED = {
    "RTX 3090": "L1, L2 and DRAM latency, rate of L2: between the A100's and the L40's",
    "RTX 4090": "latencies and rate of L2 are the L40's, which has the same chip",
    "RTX 5090": "L2 and DRAM latency, rate of L2; a stream reaches 91.5 % of the data sheet, as on RTX 3090 and 4090",
    "H100": "rate of L2: the PCIe card's 6,900 GB/s by multiprocessors and clock; latencies are the PCIe card's",
    "H200": "latencies are the H100's",
    "gaps in a graph": "A100 1.4, L40 0.9, H200 2.2 us from node to node in gpu-small-kernels (-graph, 4,096 numbers), "
    "less 0.3, 0.2 and 0.3 us for that kernel; RTX 3090, 4090 and 5090 after the L40, H100 after the H200",
    "other gaps": "in a stream, and with programmatic dependent launch",
    "units": "functions and conversions have 4 lanes; barriers take 20 cycles; 64 cycles of accesses queue",
}
