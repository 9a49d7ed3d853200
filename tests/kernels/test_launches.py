"""Kernels are launched with the options of their compile cases, which the interpreter ignores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgelm.backends.torch.sampler import DeviceSampler, RowRequest
from edgelm.engine.core import SamplingParams
from edgelm.engine.sampling.history import History
from edgelm.kernels.activation import Gate, gated, softcap
from edgelm.kernels.cache import FORMATS, allocate
from edgelm.kernels.norm import add_rms_norm, rms_norm
from edgelm.kernels.route import route
from edgelm.kernels.write_kv import write_kv
from tests.kernels.compile_case import compile_cases

OPS = ["activation", "norm", "route", "sampling", "write_kv"]


def launch_all() -> None:
    """Launch each kernel of OPS."""
    x, weight = torch.zeros(2, 64), torch.zeros(64)
    rms_norm(x, weight, 1e-5, implementation="triton")
    add_rms_norm(x, x, weight, 1e-5, implementation="triton")
    gated(x, Gate("silu"), implementation="triton")
    softcap(x, 30.0, implementation="triton")
    route(x, 2, kind="softmax", implementation="triton")
    heads, at = torch.zeros(1, 2, 32), torch.zeros(1, dtype=torch.int32)
    cache = allocate(FORMATS["int8"], 1, 2, 32, "cpu")
    write_kv(heads, heads, heads, at, at.long(), cache, rope=None, implementation="triton")
    everything = SamplingParams(repetition_penalty=1.1, logit_bias=((3, 1.0),))
    rows = [RowRequest(everything, 0, History([1, 2]))] * 2
    DeviceSampler(64, 2, "cpu", "triton").launch(x, rows, None)


def test_kernels_are_launched_with_the_fusion_that_they_are_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 warns about a launch without this option, since its default is about to change."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: dict[str, object] = {}

    def run(kernel: Any, *_: object, **options: object) -> None:
        launched[kernel.fn.__name__] = options.get("enable_fp_fusion")

    monkeypatch.setattr(InterpretedFunction, "run", run)
    launch_all()
    compiled = {case.fn.fn.__name__: case.options.get("enable_fp_fusion", True) for case in compile_cases(OPS)}
    assert len(compiled) == 13
    assert launched == compiled
