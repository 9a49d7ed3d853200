"""The cases of the trials: one product, and a kernel of the chain."""

from __future__ import annotations

from edgelm.kernels.trial import PART, SIZE
from tests.kernels.compile_case import CompileCase


def compile_cases() -> list[CompileCase]:
    """Return the trials as they are launched."""
    from edgelm.kernels.trial.kernel import link_kernel, trial_kernel

    types = {"x_ptr": "*fp16", "y_ptr": "*fp16", "out_ptr": "*fp32", "SIZE": "constexpr"}
    link = {"x_ptr": "*i32", "out_ptr": "*i32", "rounds": "i32", "SIZE": "constexpr"}
    return [
        CompileCase("trial", trial_kernel, types, {"SIZE": SIZE}, ("x_ptr", "y_ptr", "out_ptr")),
        CompileCase("trial link", link_kernel, link, {"SIZE": PART}, ("x_ptr", "out_ptr")),
    ]
