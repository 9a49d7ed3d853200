"""The cases of `embedding`: a vocabulary in every layout, with rows and columns that do not fill a tile."""

from __future__ import annotations

from tests.kernels.cases.dequantize import Case, plane_types
from tests.kernels.cases.matmul import LAYOUTS
from tests.kernels.compile_case import CompileCase

CASES = (
    *(Case(name, 37, 80) for name in LAYOUTS),
    Case("q4_k", 20, 1100),
    Case("gptq", 20, 70, ordered=True),
    Case("float16", 20, 1100),
    Case("bfloat16", 7, 33),
    Case("float32", 7, 33),
)


def compile_cases() -> list[CompileCase]:
    """Return the kernel in the formats that vocabularies have, for 4096 columns."""
    return [compile_case(name) for name in ("q4_k", "q6_k", "q8_0")]


def compile_case(name: str) -> CompileCase:
    """Describe the kernel in a layout, as it is launched on a GPU."""
    from edgelm.kernels.embedding.kernel import COLUMNS, packed_kernel

    layout = LAYOUTS[name]
    pointers = plane_types(name) | {"ids": "*i32", "last": "*i64", "out": "*fp32"}
    fixed: dict[str, object] = dict.fromkeys(("high", "offsets", "supers", "order"))
    fixed |= {"columns": 4096, "chunks": 64, "BITS": layout.bits, "GROUP": layout.group, "SCALE": layout.scale}
    fixed |= {"CODE": layout.code, "ZERO": layout.zero, "OFFSET": layout.offset, "BOOK": (), "ORDER": False}
    numbers = {"num_last": "i32", "last_stride": "i32", "rows": "i32", "scale": "fp32"}
    signature = dict.fromkeys(packed_kernel.arg_names, "constexpr") | numbers
    return CompileCase(
        f"embedding {name}",
        packed_kernel,
        signature | pointers,
        {key: value for key, value in (fixed | {"COLUMNS": COLUMNS, "ASM": True}).items() if key not in pointers},
        tuple(pointers),
        options={"enable_fp_fusion": False},
        wide_loads=False,  # each column finds its own word
        main=name == "q6_k",
    )
