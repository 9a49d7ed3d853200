"""The benchmark: no wrong result is timed, results are complete, and inputs are cloned for cold caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from edgelm.kernels.gpu_target import num_sms, target_of
from tests.kernels import bench, benchmark
from tests.kernels.benchmark import BenchCase, Work, bench_cases, check, cloned, compare, nbytes_of, tensors_of
from tests.kernels.compile_case import op_names
from tests.kernels.twins import difference, plain_kernels, same_bits

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).resolve().parents[2]


def case_of(run, op="op", **fields) -> BenchCase:
    """Return a case whose reference doubles its input."""
    work = Work(
        lambda generator: torch.randn(4, 3, generator=generator), lambda x, how: 2 * x if how == "reference" else run(x)
    )
    return BenchCase(op, "4x3", 4, "float32", work, nbytes_of, **fields)


def test_the_shapes_that_the_goals_name_are_there():
    cases = bench_cases(None, False)
    keys = {(case.op, case.shape, case.format, case.rows) for case in cases}
    assert len(keys) == len(cases)
    for shape in ("4096x4096", "1024x4096", "14336x4096", "4096x14336", "128256x4096"):
        for name in ("q4_0", "q4_k", "q6_k", "q8_0"):
            assert all(("matmul", shape, name, rows) in keys for rows in (1, 2, 4, 8, 16))
    for name in ("f16", "int8", "fp8", "k8v4", "k6v4"):
        for length in (1024, 8192, 32768, 131072):
            assert all(("attention", f"32:8x128 len={length}", name, rows) in keys for rows in (1, 8))
    assert {"norm", "write_kv", "sampling", "bandwidth"} <= {case.op for case in cases}
    assert all(case.rival is not None for case in cases if case.op == "matmul")


def test_every_case_is_of_an_op_and_has_a_tiny_brother():
    assert {case.op for case in bench_cases(None, True)} == {case.op for case in bench_cases(None, False)}
    assert {case.op for case in bench_cases(None, True)} <= set(op_names())


def test_cases_of_some_ops_are_those_and_no_others():
    assert {case.op for case in bench_cases(["norm", "bandwidth"], True)} == {"norm", "bandwidth"}


def test_equal_results_are_green():
    assert check(case_of(lambda x: x + x), CPU, 1).fault == ""


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (lambda x: 2 * x + 0.1, "of the largest value, more than"),
        (lambda x: (2 * x)[:3], "[3, 3], not torch.float32 [4, 3]"),
        (lambda x: (2 * x).half(), "torch.float16"),
        (lambda x: torch.where(x == x.max(), float("nan"), 2 * x), "1 of 12 values are finite in one of the two only"),
        (lambda x: x.undefined, "AttributeError"),
    ],
)
def test_a_wrong_result_is_red(run, fault):
    assert fault in check(case_of(run, tolerance=1e-3), CPU, 1).fault


def test_integers_must_be_equal_whatever_the_tolerance():
    one = torch.arange(5)
    assert compare(one, one.clone(), 1.0).green
    assert compare(one, one.flip(0), 1.0).fault == "4 of 5 integers differ"


def test_each_run_has_inputs_of_its_own():
    assert check(case_of(lambda x: x.mul_(2)), CPU, 1).green
    assert check(case_of(lambda x: x.mul_(2), compared=lambda x, y: (x, y)), CPU, 1).fault


def test_cases_can_be_chosen_by_shape_and_format(monkeypatch):
    cases = [
        case_of(lambda x: 2 * x)._replace(shape=shape, format=name) for shape in ("1x2", "3x4") for name in ("a", "b")
    ]
    monkeypatch.setattr(benchmark, "bench_cases", lambda ops, tiny: cases)

    def chosen(*arguments: str) -> list[tuple[str, str]]:
        rows = bench._measure(CPU, bench._parse(["--tiny", *arguments]), None)
        return [(row.shape, row.format) for row in rows]

    assert chosen() == [(case.shape, case.format) for case in cases]
    assert chosen("--shapes", "3x4") == [("3x4", "a"), ("3x4", "b")]
    assert chosen("--formats", "b", "c") == [("1x2", "b"), ("3x4", "b")]
    assert chosen("--shapes", "1x2", "--formats", "b") == [("1x2", "b")]


def test_where_one_case_is_wrong_no_case_of_its_op_is_timed(monkeypatch, capsys, tmp_path):
    good, bad = case_of(lambda x: 2 * x, "good"), case_of(lambda x: 3 * x, "bad")
    monkeypatch.setattr(benchmark, "bench_cases", lambda ops, tiny: [bad, bad._replace(rows=1), good])
    monkeypatch.setattr(bench, "_time", lambda case, row, device, bandwidth: bench.replace(row, us=7.0))
    monkeypatch.setattr(benchmark, "check", lambda case, device, seed: check(case, CPU, seed))
    rows = list(bench._measure(torch.device("cuda"), bench._parse(["--tiny"]), 1000.0))
    assert [(row.op, row.us) for row in rows] == [("bad", None), ("bad", None), ("good", 7.0)]
    assert bench.main(["--tiny", "--out", str(tmp_path / "out.jsonl")]) == 1
    assert "at least one is wrong" in capsys.readouterr().out


class Pair(NamedTuple):
    one: object
    other: object


def test_clones_have_tensors_of_their_own_with_the_same_strides():
    view = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    pair = Pair([view, 5], target_of(CPU))
    copy = cloned(pair)
    assert isinstance(copy, Pair)
    assert torch.equal(copy.one[0], view)
    assert copy.one[0].stride() == view.stride()
    assert copy.one[0].data_ptr() != view.data_ptr()
    assert copy[1:] == pair[1:]
    assert nbytes_of(pair) == 6 * 4


def test_weights_and_caches_are_cloned_whole():
    cases = {case.op: case for case in bench_cases(["matmul", "attention"], True)}
    for case in cases.values():
        inputs = benchmark.make_inputs(case.work, CPU, 3)
        copy = cloned(inputs)
        pairs = list(zip(tensors_of(inputs), tensors_of(copy), strict=True))
        assert len(pairs) >= 3
        assert all(same_bits(*pair) and pair[0].data_ptr() != pair[1].data_ptr() for pair in pairs)
        assert case.moved_bytes(inputs) > 0


def test_equal_seeds_make_equal_inputs():
    case = bench_cases(["matmul"], True)[0]
    one, same, other = (tensors_of(benchmark.make_inputs(case.work, CPU, seed))[0] for seed in (1, 1, 2))
    assert same_bits(one, same)
    assert not same_bits(one, other)


def test_the_program_dry_runs_in_the_interpreter(tmp_path):
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "tests.kernels.bench", "--tiny", "--ops", "norm", "bandwidth", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert head["target"]["triton"] == target_of(CPU).triton
    assert {"gpu", "driver", "cuda", "torch", "triton", "num_sms"} <= set(head["target"])
    assert {row["op"] for row in rows} == {"norm", "bandwidth"}
    assert all(row["fault"] == "" and row["us"] is None for row in rows)
    assert f"{len(rows)} cases, all agree" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(capsys):
    assert bench.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "no GPU: nothing can be measured (--tiny runs small cases in Triton's interpreter, untimed)"
    ]


def test_the_cpu_is_a_target_with_few_processors():
    assert num_sms(CPU) == target_of(CPU).num_sms == 4


class Kernel:
    """A kernel whose assembly is wrong for negative numbers."""

    __name__ = "kernel"

    def run(self, x, **options):
        return x.abs() * 2 if options["ASM"] else x * 2


def test_a_twin_of_other_bits_is_seen():
    kernel = Kernel()
    same = case_of(lambda x: kernel.run(x.abs(), ASM=True))
    assert difference(same, CPU, Kernel) == ("", 1)
    other = case_of(lambda x: kernel.run(x, ASM=True))
    assert difference(other, CPU, Kernel) == ("tensor 0 differs", 1)


def test_kernels_are_launched_as_before_afterwards():
    run = Kernel.run
    with plain_kernels(Kernel) as changed:
        assert Kernel().run(torch.tensor([-1.0]), ASM=True).item() == -2
        assert Kernel().run(torch.tensor([-1.0]), ASM=False).item() == -2
    assert changed == {"kernel": 1}
    assert Kernel.run is run


def test_bits_are_compared_not_values():
    zero = torch.tensor([0.0, float("nan")])
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, torch.tensor([-0.0, float("nan")]))
    assert not same_bits(zero, zero.double())
