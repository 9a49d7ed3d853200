"""Cases of the bandwidth probe."""

from __future__ import annotations

from tests.kernels.bandwidth import BLOCK_LEN
from tests.kernels.compile_case import CompileCase

SIZES = (BLOCK_LEN, 5 * BLOCK_LEN, 37 * BLOCK_LEN)  # words; with fewer blocks than programs, and with more


def compile_cases() -> list[CompileCase]:
    """Return the probe in its default configuration: one addition and a quarter of a load per word."""
    from tests.kernels.bandwidth.kernel import CANDIDATES, read_kernel

    block, warps, _ = CANDIDATES[0]
    return [
        CompileCase(
            "bandwidth read",
            read_kernel,
            {"words": "*i32", "sums": "*i64", "blocks": "i32", "BLOCK": "constexpr"},
            {"BLOCK": block},
            ("words", "sums"),
            num_warps=warps,
            loop_weights=block // (32 * warps),
            budget=2.0,
        )
    ]
