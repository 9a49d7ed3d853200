"""The case of the trial: one product."""

from __future__ import annotations

from edgelm.kernels.trial import SIZE
from tests.kernels.compile_case import CompileCase


def compile_cases() -> list[CompileCase]:
    """Return the trial as it is launched."""
    from edgelm.kernels.trial.kernel import trial_kernel

    types = {"x_ptr": "*fp16", "y_ptr": "*fp16", "out_ptr": "*fp32", "SIZE": "constexpr"}
    return [CompileCase("trial", trial_kernel, types, {"SIZE": SIZE}, ("x_ptr", "y_ptr", "out_ptr"))]
