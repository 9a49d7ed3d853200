"""Checks of the whole model on small kernels that Triton compiles here: a program for a child process.

The kernels' times are known in closed form, their traffic by hand.
"""

from __future__ import annotations

import torch

from tests.kernels.compile_case import compile_for
from tests.kernels.performance.estimate import estimate
from tests.kernels.performance.gpus import GPUS
from tests.kernels.performance.launch import Launch
from tests.kernels.performance.traffic import trace
from tests.kernels.sass_samples import compile_cases


def main() -> None:
    wide = next(case for case in compile_cases() if case.name == "wide")
    count, block = 64, 1024
    for gpu in (GPUS["H100"], GPUS["RTX 4090"]):
        compiled = compile_for(wide, gpu.capability)
        args = {"x": torch.empty(count * block, dtype=torch.int32), "out": torch.empty(block, dtype=torch.int32)}
        launch = Launch(compiled, (1, 1, 1), args | {"count": count, "stride": block})
        traffic = trace(launch)
        assert traffic.dram_bytes(frozenset()) == count * block * 4, traffic.dram_bytes(frozenset())
        alone = estimate(launch, gpu)
        assert alone.bound == "latency", alone
        assert not alone.unmatched, alone.unmatched
        # 4 warps load 1,024 numbers in two loads of 512 bytes each, and wait for them before the next ones
        assert alone.us > gpu.microseconds(count / 4 * gpu.dram_latency) * 0.9, (alone.us, gpu.name)
        assert alone.counts.sectors_per_request == 16, alone.counts
        warm = estimate(launch._replace(warm=frozenset({"x", "out"})), gpu)
        assert warm.us < alone.us, (warm.us, alone.us)
        assert warm.counts.dram_bytes == 0
    print("ok")


if __name__ == "__main__":
    main()
