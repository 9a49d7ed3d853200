"""Every kernel, compiled for five architectures and run by the PTX emulator, computes what its reference does."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.kernels.cache import FORMATS
from tests.counts import Count
from tests.kernels.cases.matmul import LAYOUTS
from tests.kernels.emulated.case import CAPABILITIES, all_cases, launched_late
from tests.kernels.emulated.children import ROOT, TEST_LIMIT_S, lines_of

WHOLE = bool(Count(test=0, soak=1))
pytestmark = pytest.mark.timeout(TEST_LIMIT_S)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Emulate the cases of every test run; with --soak, all."""
    return lines_of("run", *([] if WHOLE else ["--main"]))


def launched_kernels(folder: Path) -> set[str]:
    """Return the functions that `folder` launches: `name[grid](...)`, where `name` is a function of triton.jit."""
    kernels, launched = set(), set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
            ):
                kernels.add(node.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    return kernels & launched


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_results_are_those_of_the_reference(results: list[dict[str, Any]], capability: int) -> None:
    of_architecture = [result for result in results if result["capability"] == capability]
    assert of_architecture
    faults = [f"{result['name']}: {result['fault']}" for result in of_architecture if result["fault"]]
    assert not faults, "\n".join(faults)
    assert all(math.isfinite(result["difference"]) and result["kernels"] for result in of_architecture)


def test_every_kernel_is_emulated(results: list[dict[str, Any]]) -> None:
    """A new kernel needs a case in this folder, and one of its cases has to be in every test run."""
    kernels = launched_kernels(ROOT / "kernels")
    assert len(kernels) > 20
    assert not kernels - {name for result in results for name in result["kernels"]}


def test_a_kernel_of_a_step_without_pdl_is_a_fault() -> None:
    launches = [SimpleNamespace(kernel=name, dependent=name == "with") for name in ("with", "without", "trial_kernel")]
    assert launched_late(SimpleNamespace(capability=90, launches=launches)) == ["without"]
    assert launched_late(SimpleNamespace(capability=89, launches=launches)) == []


def test_every_format_has_a_case() -> None:
    """All weight formats in all ops that read weights, and all formats of the KV cache; few rows, and prompts."""
    cases = all_cases()
    for op in ("matmul", "dequant_gemm", "grouped"):
        assert not set(LAYOUTS) - {case.format for case in cases if case.op == op}, op
    for op in ("write_kv", "attention"):
        assert {case.kv for case in cases if case.op == op} == set(FORMATS)
    prompts = {case.kv for case in cases if case.op == "attention" and case.rows > 16}
    assert prompts == {case.kv for case in cases if case.op == "attention" and case.rows <= 16} == set(FORMATS)


def test_every_architecture_runs_in_every_test_run() -> None:
    for capability in CAPABILITIES:
        ops = {case.op for case in all_cases() if capability in case.main}
        assert len(ops) >= 4, f"sm_{capability}: {sorted(ops)}"
