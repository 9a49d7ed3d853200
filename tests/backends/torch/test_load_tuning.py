"""Kernels are tuned when a model is first loaded on a GPU: by simulated times, and on the CPU by real numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from edgelm.backends.reports import LOGGED
from edgelm.backends.torch import load_tuning
from edgelm.backends.torch.check_bounds import bounds_of
from edgelm.backends.torch.load_tuning import agrees, tune_model
from edgelm.kernels.layout import DenseWeight
from edgelm.kernels.matmul import Norm, kernel, matmul, matmul_and_norm, reference
from edgelm.kernels.tuning import TABLE, Table

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(500)
CPU = torch.device("cpu")


# -- whole starts, with simulated times --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.torch.tuning_checks", str(tmp_path_factory.mktemp("tuned"))],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {result["situation"]: result for result in results}


def lines(count: int) -> list[str]:
    return [f"tuning the GPU's kernels: {number} of {count}" for number in range(1, count + 1)]


def test_the_faster_configuration_of_each_kernel_is_taken_and_kept(starts: dict[str, dict[str, Any]]) -> None:
    first = starts["first"]
    assert first["lines"] == lines(5)
    assert first["faster"] == first["matrices"] == 5
    assert [config["prefetch"] for config in first["kept"]["matmul"].values()] == [0] * 5


def test_the_next_start_measures_nothing_and_compiles_what_it_needs(starts: dict[str, dict[str, Any]]) -> None:
    second = starts["second"]
    assert (second["timed"], second["lines"], second["unused"]) == (0, [], 0)
    assert second["faster"] == 5
    assert second["kept"] == starts["first"]["kept"]


def test_after_loading_no_step_compiles_or_needs_more_memory(starts: dict[str, dict[str, Any]]) -> None:
    for start in starts.values():
        if not start["error"]:
            assert (start["compiled later"], start["more bytes later"], start["alone"]) == (0, 0, 0)


def test_decoding_and_verification_use_one_configuration(starts: dict[str, dict[str, Any]]) -> None:
    for start in starts.values():
        if not start["error"]:
            assert start["of one config"] == start["matrices"] == 5


def test_a_damaged_file_is_measured_anew(starts: dict[str, dict[str, Any]]) -> None:
    assert starts["damaged"]["timed"] == starts["first"]["timed"] > 0
    assert starts["damaged"]["kept"] == starts["first"]["kept"]


def test_without_tuning_or_graphs_the_defaults_run_and_nothing_is_kept(starts: dict[str, dict[str, Any]]) -> None:
    for name in ("not tuned", "no graphs"):
        assert (starts[name]["timed"], starts[name]["faster"], starts[name]["files"]) == (0, 0, 0)


@pytest.mark.parametrize("name", ["wrong", "does not fit", "equal", "slow with many rows"])
def test_some_configurations_are_never_taken(starts: dict[str, dict[str, Any]], name: str) -> None:
    start = starts[name]
    assert start["timed"] > 0
    assert start["faster"] == 0
    assert all(config["prefetch"] for config in start["kept"]["matmul"].values())
    assert len(start["kept"]["matmul"]) == 5, "they are not measured again"


def test_what_the_limit_leaves_is_tuned_at_the_next_start(starts: dict[str, dict[str, Any]]) -> None:
    limited, later = starts["limit"], starts["after the limit"]
    done = len(limited["lines"])
    assert 0 < done < 5
    assert limited["faster"] == len(limited["kept"]["matmul"]) == done
    assert later["lines"] == lines(5 - done)
    assert later["faster"] == 5


def test_a_second_model_leaves_the_configurations_of_the_first(starts: dict[str, dict[str, Any]]) -> None:
    """Those that the limit left run with their default; a change would give one model two roundings."""
    second = starts["a second model after the limit"]
    assert (second["timed"], second["faster"]) == (0, starts["limit"]["faster"])


def test_cancelling_and_a_lack_of_memory_lose_nothing(starts: dict[str, dict[str, Any]]) -> None:
    assert starts["cancelled"]["error"] == "ModelError: loading the model was cancelled"
    assert starts["after cancelling"]["faster"] == 5
    assert (starts["out of memory"]["error"], starts["out of memory"]["faster"]) == ("", 0)
    for name in ("cancelled", "out of memory"):
        assert {note["times"] for note in starts[name]["kept"]["unfinished"].values()} == {0}


def test_a_kernel_that_breaks_the_gpu_twice_is_not_tried_again(starts: dict[str, dict[str, Any]]) -> None:
    for name in ("broken", "broken again"):
        assert "illegal memory access" in starts[name]["error"]
    assert starts["not tried again"]["faster"] == 4
    assert starts["not tried again"]["lines"] == lines(4)


# -- the comparison, with real numbers ---------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    """The table of a process in which configurations without prefetching are faster, as simulated."""
    TABLE.close()
    monkeypatch.setattr(load_tuning, "time_us", lambda *_: 1.0 if all_default() else 0.5)
    monkeypatch.setattr(load_tuning, "NUM_CANDIDATES", 2)  # the interpreter is slow; the second one has no prefetching
    monkeypatch.setattr(load_tuning._Tuner, "_missing", lambda *_: [])  # it compiles nothing
    yield TABLE
    TABLE.close()


def all_default() -> bool:
    return all(config._asdict()["prefetch"] for config in TABLE.in_use.values())


def operands(rows: int) -> tuple[torch.Tensor, DenseWeight]:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, 64), (32, 64)))
    return x, DenseWeight(weight)


def tune() -> None:
    """Tune a model that is one matmul, on the CPU."""
    x, weight = operands(9)
    tune_model(TABLE, lambda rows: matmul(x[:rows], weight, implementation="triton"), 9, CPU, LOGGED)
    assert list(TABLE.stored["matmul"]) == ["bfloat16 32x64"]


def test_a_right_configuration_is_taken(table: Table) -> None:
    tune()
    assert not all_default()


@pytest.mark.parametrize("rows", [1, 9])
def test_one_with_a_wrong_number_is_not(table: Table, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Wrong with so many rows and more: the last number of rows is only tried with those that are faster."""
    real = kernel.decode

    def spoiled(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        result = real(x, *args, **named)
        if len(x) >= rows and not all_default():
            result[0, -1] *= 1.1
        return result

    monkeypatch.setattr(kernel, "decode", spoiled)
    tune()
    assert all_default()


@pytest.mark.parametrize("wrong", [None, 0, 1, 2], ids=["right", "y", "scaled", "squares"])
def test_all_results_of_a_product_for_a_norm_are_compared(
    table: Table, monkeypatch: pytest.MonkeyPatch, wrong: int | None
) -> None:
    """They are kept under the op of the product alone, which has the same kernel."""
    real = kernel.matmul_scaled

    def spoiled(*args: Any) -> tuple[torch.Tensor, ...]:
        results = real(*args)
        if wrong is not None and not all_default():
            results[wrong][0, -1] *= 1.5
        return results

    monkeypatch.setattr(kernel, "matmul_scaled", spoiled)
    x, weight = operands(9)
    norm = Norm(torch.rand(32, generator=torch.Generator().manual_seed(2)) + 0.5, 1e-5)

    def step(rows: int) -> object:
        return matmul_and_norm(x[:rows], weight, norm, dtype=torch.bfloat16, implementation="triton")

    tune_model(TABLE, step, 9, CPU, LOGGED)
    assert list(TABLE.stored["matmul"]) == ["bfloat16 32x64"]
    assert all_default() == (wrong is not None)


def test_a_result_may_differ_by_rounding_only() -> None:
    args = (*operands(3), None, None, None, None, torch.bfloat16)
    want = reference.matmul(*args)
    (bound,) = bounds_of("matmul", args, (), [want]) or [None]
    assert agrees(want, want, None)
    assert agrees(want * (1 + 2**-8), want, bound)
    assert not agrees(want * (1 + 2**-8), want, None)
    for spoil in (1.5, torch.nan, torch.inf):
        wrong = want.clone()
        wrong[1, 7] = want.abs().max() * spoil
        assert not agrees(wrong, want, bound)
