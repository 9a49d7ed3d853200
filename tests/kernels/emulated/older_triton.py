"""Emulate two kernels as they are launched with Triton 3.6, compiled by the installed Triton. Print a line for each.

    python -m tests.kernels.emulated.older_triton

A line has the fault of the result, and what the PTX has of the instructions that Triton 3.6 orders wrongly.
"""

from __future__ import annotations

import json
import re
import sys
from unittest.mock import patch

from edgelm.kernels import gpu_target
from tests.kernels.emulated.case import all_cases, emulate

CASES = (
    ("write_kv float16 kv=k6v4 rows=5", 80),
    ("dequant_gemm q4_k rows=130", 90),
    ("dequant_gemm q4_k rows=130", 89),
)


def main() -> int:
    faults = 0
    cases = all_cases()
    for name, capability in CASES:
        texts = []

        def keep(_: str, ptx: str, texts: list[str] = texts) -> str:
            texts.append(ptx)
            return ptx

        case = next(case for case in cases if case.name.startswith(name))
        result = emulate(case, capability, 27, races=True, change=keep)
        faults += bool(result.outcome.fault)
        line = {
            "name": name,
            "capability": capability,
            "fault": result.outcome.fault,
            "ahead": sum("cp.async" in text for text in texts),
            "waits": sorted({wait for text in texts for wait in re.findall(r"wgmma\.wait_group\S* (\d+)", text)}),
        }
        print(json.dumps(line), flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    with patch.object(gpu_target, "triton_version", lambda: "3.6.0"):  # before the kernels are imported
        status = main()
    sys.exit(status)
