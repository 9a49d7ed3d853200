"""The compiled kernel of the gate of heads."""

from __future__ import annotations

from tests.kernels.compile_case import CompileCase


def compile_cases() -> list[CompileCase]:
    """Return the gate of attention's heads, that behind the norm of a gated delta net, and one of whole rows."""
    from edgelm.kernels.head_gate import kernel as kernels

    cases = []
    for name, x, head_dim in (("attention", "*bf16", 256), ("delta", "*fp32", 128), ("row", "*bf16", 256)):
        pointers = {
            "x_ptr": x,
            "gate_ptr": "*fp32" if name == "row" else "*bf16",
            "norm_ptr": "*fp32",
            "out_ptr": "*bf16",
        }
        strides = dict.fromkeys(("x_row", "x_head", "gate_row", "gate_head"), "i32")
        constants: dict[str, object] = {"D": head_dim, "P": head_dim, "ONE": name == "row"}
        absent: dict[str, object] = {"norm_ptr": None} if name != "delta" else {}
        signature = pointers | strides | {"heads": "i32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
        cases.append(
            CompileCase(
                name=f"head_gate {name}",
                fn=kernels.gate_heads_kernel,
                signature=signature,
                constants=absent | constants,
                divisible=tuple(key for key in (*pointers, *strides) if key not in absent),
                num_warps=1,
                options=kernels.OPTIONS,
                main=name == "delta",
            )
        )
    return cases
