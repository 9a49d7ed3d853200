"""How kernels are launched, where the interpreter does not look: the options that their compile cases have too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgelm.core import SamplingParams
from edgelm.kernels.activation import gated, softcap
from edgelm.kernels.cache import FORMATS, allocate
from edgelm.kernels.compile_case import compile_cases
from edgelm.kernels.gate import Gate
from edgelm.kernels.norm import add_rms_norm, layer_norm, rms_norm
from edgelm.kernels.route import route
from edgelm.kernels.store import store
from edgelm.sampling.device import DeviceSampler, RowRequest
from edgelm.sampling.history import History

OPS = ["activation", "norm", "route", "sampling", "store"]


def launch_all() -> None:
    """Launch each kernel of OPS."""
    x, weight = torch.zeros(2, 64), torch.zeros(64)
    rms_norm(x, weight, 1e-5, implementation="triton")
    add_rms_norm(x, x, weight, 1e-5, implementation="triton")
    layer_norm(x, weight, weight, 1e-5, implementation="triton")
    gated(x, Gate("silu"), implementation="triton")
    softcap(x, 30.0, implementation="triton")
    route(x, 2, kind="softmax", implementation="triton")
    heads, at = torch.zeros(1, 2, 32), torch.zeros(1, dtype=torch.int32)
    cache = allocate(FORMATS["int8"], 1, 2, 32, "cpu")
    store(heads, heads, heads, at, at.long(), cache, rope=None, implementation="triton")
    everything = SamplingParams(repetition_penalty=1.1, logit_bias=((3, 1.0),))
    rows = [RowRequest(everything, 0, History([1, 2]))] * 2
    DeviceSampler(64, 2, "cpu", "triton").launch(x, rows, None)


def test_kernels_are_launched_with_the_fusion_that_they_are_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 warns of a launch that does not say it, since another default is to come."""
    from triton.runtime.interpreter import InterpretedFunction

    said: dict[str, object] = {}

    def run(kernel: Any, *_: object, **options: object) -> None:
        said[kernel.fn.__name__] = options.get("enable_fp_fusion")

    monkeypatch.setattr(InterpretedFunction, "run", run)
    launch_all()
    wanted = {case.fn.fn.__name__: case.options.get("enable_fp_fusion", True) for case in compile_cases(OPS)}
    assert len(wanted) == 14
    assert said == wanted
