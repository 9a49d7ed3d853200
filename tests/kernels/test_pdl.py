"""Which GPUs kernels are launched on with programmatic dependent launch, and what that changes in them."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from edgelm.kernels import pdl
from tests.kernels.emulated.case import OUTSIDE_OF_STEPS
from tests.kernels.emulated.children import ROOT
from tests.kernels.emulated.test_cases import launched_kernels


class Driver:
    """Stands in for Triton's driver, on one GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(arch=self.capability)


@pytest.mark.parametrize(
    ("capability", "interpreting", "used"),
    [
        (80, False, False),
        (86, False, False),
        (89, False, False),
        (90, False, True),
        (120, False, True),
        (90, True, False),
    ],
)
def test_gpus_from_sm_90_on_have_it(
    monkeypatch: pytest.MonkeyPatch, capability: int, interpreting: bool, used: bool
) -> None:
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", Driver(capability))
    monkeypatch.setattr(pdl, "interpreting", lambda: interpreting)
    assert pdl.uses_pdl() == used


def test_every_kernel_of_a_step_waits() -> None:
    """Every kernel that is launched: it may follow one that lets it begin early."""
    kernels = {}
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                kernels[node.name] = node
    launched = launched_kernels(ROOT / "kernels") - OUTSIDE_OF_STEPS
    assert len(launched) > 20
    for name in launched:
        last = kernels[name].args.args[-1]
        assert last.arg == "launch_pdl", name
        called = [ast.unparse(call.func) for call in ast.walk(kernels[name]) if isinstance(call, ast.Call)]
        assert "begin_dependent" in called or {"let_next_begin", "wait_for_earlier"} <= {*called}, name
