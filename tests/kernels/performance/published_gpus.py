"""The GPUs of the published timings: those of the model's table and others, with their peaks of matrix products.

Owns the rows of the others and the peaks. A row of another GPU is that of a GPU of the same architecture with the
vendor's data sheet's number of multiprocessors, clock, bandwidth and L2 cache; what is derived: the bandwidth of a
stream has the sibling's part of the data sheet's, the L2 cache's the sibling's rate for each multiprocessor and cycle.
"""

from __future__ import annotations

from tests.kernels.performance import gpus
from tests.kernels.performance.gpus import Gpu


def _like(sibling: Gpu, name: str, num_sms: int, clock_ghz: float, dram_gbs: float, l2_mb: float, **more: float) -> Gpu:
    rate = num_sms * clock_ghz / (sibling.num_sms * sibling.clock_ghz)
    stream = dram_gbs * sibling.stream_gbs / sibling.dram_gbs
    row = sibling._replace(name=name, num_sms=num_sms, clock_ghz=clock_ghz, dram_gbs=dram_gbs, stream_gbs=stream)
    return row._replace(l2_mb=l2_mb, l2_gbs=sibling.l2_gbs * rate)._replace(**more)


FULL_RATE = 128  # 16-bit products a cycle and scheduler, summed in float32: the GPUs for servers are not slowed down
OTHERS = [
    _like(gpus.A100, "A100 PCIe", 108, 1.41, 1935, 40),
    _like(gpus.A100, "A100 40GB", 108, 1.41, 1555, 40, stream_gbs=1503),
    _like(gpus.H100, "H100 PCIe", 114, 1.755, 2039, 50),
    _like(gpus.RTX_3090, "A10G", 80, 1.71, 600, 6),
    _like(gpus.RTX_3090, "RTX A4000", 48, 1.56, 448, 4, tensor_macs=FULL_RATE, tensor_macs_group=FULL_RATE),
    _like(gpus.RTX_4090, "L4", 58, 2.04, 300, 48, tensor_macs=FULL_RATE, tensor_macs_group=FULL_RATE),
    _like(gpus.RTX_4090, "L40", 142, 2.49, 864, 96, stream_gbs=846),
    # at the clock and the bandwidth of a copy that its measurements' source measured, above and below the data sheet's
    _like(gpus.RTX_4090, "RTX 4060", 24, 2.65, 272, 24, stream_gbs=248),
]
GPUS = gpus.GPUS | {gpu.name: gpu for gpu in OTHERS}

PEAKS = {  # 1e12 operations a second, dense, of the data sheets; "half" sums in fp32, "half sum" in fp16
    "A100": {"half": 312.0, "tf32": 156, "fp32": 19.5},
    "A100 PCIe": {"half": 312.0, "tf32": 156, "fp32": 19.5},
    "A100 40GB": {"half": 312.0},
    "L40": {"half": 181.0},
    "A10G": {"half": 70.0},
    "RTX 3090": {"half": 71.0},
    "RTX 4090": {"half": 165.0, "tf32": 82.6},
    "RTX 4060": {"half": 34.0, "half sum": 68},  # at the clock of the measurements
    "RTX 5090": {"half": 210.0},
    "H100": {"half": 989.0, "tf32": 495, "fp8": 1979},
    "H100 PCIe": {"half": 756.0},
}
