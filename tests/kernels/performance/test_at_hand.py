"""Measured beside simulated: nodes are matched, copies are cold, and the whole program runs without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from edgelm.kernels.gpu_target import Target
from tests.kernels.performance import at_hand, kept, llama_bench
from tests.kernels.performance.at_hand import Step, attempt, gpu_of, step_table
from tests.kernels.performance.budget import Budget, Row
from tests.kernels.performance.gpus import GPUS
from tests.kernels.performance.launched import Arguments, arguments_of, cold_bytes, num_copies, sequence_us
from tests.kernels.performance.measured import lines_of, pairs_of, table
from tests.kernels.performance.recording import Call, storage_of
from tests.kernels.performance.step import SCENES, Part, Scene
from tests.kernels.performance.test_kept import ESTIMATE

ROOT = Path(__file__).resolve().parents[3]


def target_of(gpu: str, num_sms: int, capability: int = 90) -> Target:
    return Target(gpu, capability, num_sms, 80 << 30, 50 << 20, "580", "13.0", "2.11", "3.6.0")


@pytest.mark.parametrize(
    ("name", "num_sms", "capability", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 90, "H100"),
        ("NVIDIA H200", 132, 90, "H200"),
        ("NVIDIA GeForce RTX 4090", 128, 89, "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 89, None),
        ("NVIDIA GeForce RTX 4090 D", 114, 89, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 90, None),
        ("NVIDIA H100 PCIe", 114, 90, None),
        ("NVIDIA H100 NVL", 132, 90, None),
        ("NVIDIA GH200 480GB", 132, 90, None),
        ("NVIDIA A100-SXM4-40GB", 108, 80, None),
        ("NVIDIA A100-SXM4-80GB", 108, 80, "A100"),
        ("Tesla T4", 40, 75, None),
    ],
)
def test_a_gpu_is_one_of_the_table_or_none(name: str, num_sms: int, capability: int, gpu: str | None) -> None:
    found = gpu_of(target_of(name, num_sms, capability))
    assert (found.name if found else None) == gpu


def call_of(name: str, *args: object) -> Call:
    return Call(name, lambda *_: None, args, {})


def test_nodes_are_matched_in_order_by_their_names() -> None:
    assert list(pairs_of(["a", "b", "copy", "c"], ["a", "b", "c"])) == [(0, 0), (1, 1), (2, None), (3, 2)]
    assert list(pairs_of([], ["a"])) == [(None, 0)]
    assert list(pairs_of(["a", "a"], ["a", "d", "a"])) == [(0, 0), (None, 1), (1, 2)]


def test_each_node_has_its_simulated_time_with_a_gap_beside_its_measured_one() -> None:
    rows = [Row("layer", 16, "decode_kernel 64x64 4 bits", 8.1, ESTIMATE), Row("layer", 16, "torch copy_", 0.7, None)]
    seen: list[float] = []

    def measure(_: Part, read: list[float]) -> Sequence[float | None]:
        seen.extend(read)
        return [15.0, 3.0]

    parts = [Part("layer", 16, [call_of("decode_kernel"), call_of("torch mul")])]
    first, second, third = lines_of(Budget(GPUS["H100"], rows), parts, measure)
    assert seen == [2e6, 0.0]
    assert (first.simulated_us, first.measured_us, first.ratio) == (10.0, 15.0, 1.5)
    assert {second.name: second.simulated_us, third.name: third.simulated_us} == {
        "torch copy_": 0.7 + 1.9,
        "torch mul": None,
    }
    text = "\n".join(table([first, second, third]))
    assert "nodes: 2 launched here, 1 of them simulated" in text
    assert "simulated 0.160 ms, measured 0.240 ms, ratio 1.50" in text
    assert "not launched" in text
    assert "not simulated" in text


def test_copies_are_more_than_the_cache_holds_if_there_is_room() -> None:
    l2 = 50 << 20
    assert num_copies(0, 0.0, l2, 1 << 40) == 1  # nothing is cold
    assert num_copies(400 << 20, 400 << 20, l2, 1 << 40) == 1
    assert num_copies(20 << 20, 20 << 20, l2, 1 << 40) == 10
    assert num_copies(20 << 20, 2 << 20, l2, 1 << 40) == 100  # a part of a cache is read
    assert num_copies(20 << 20, 2 << 20, l2, 400 << 20) == 10


def test_a_copy_has_memory_of_its_own_for_what_is_cold_and_nothing_else() -> None:
    planes = torch.arange(24, dtype=torch.int32)
    x = torch.zeros(3)
    call = Call("k", lambda *_: None, (planes[:8], x, 5), {"other": planes.view(4, 6)[:, 2:4]})
    cold = {storage_of(planes)}
    assert cold_bytes(call, cold) == 24 * 4
    (args, options), (copy_args, copy_options) = arguments_of(call, cold, 2)
    assert args[0] is call.args[0]
    assert options is call.options
    assert copy_args[1] is x
    assert copy_args[2] == 5
    copies = [copy_args[0], copy_options["other"]]
    for copy, own in zip(copies, (planes[:8], planes.view(4, 6)[:, 2:4]), strict=True):
        assert torch.equal(copy, own)
        assert copy.stride() == own.stride()
        assert storage_of(copy) not in cold
    assert storage_of(copies[0]) == storage_of(copies[1])
    assert copies[0].untyped_storage().nbytes() == planes.untyped_storage().nbytes()


def test_kernels_that_need_each_other_are_timed_by_what_each_adds() -> None:
    ran: list[str] = []
    calls = [Call(name, lambda name=name: ran.append(name), (), {}) for name in "abc"]

    def clock(run: Callable[[Arguments], object], inputs: Sequence[Arguments]) -> float:
        ran.clear()
        run(inputs[0])
        return float(sum({"a": 5, "b": 2, "c": 4}[name] for name in ran))

    assert list(sequence_us(calls, clock)) == [5.0, 2.0, 4.0]


def test_a_part_that_fails_is_told_and_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt(lambda: 5) == ""
    assert attempt(lambda: 1 // 0) == "ZeroDivisionError: integer division or modulo by zero"

    def fail(*_: object, **__: object) -> Iterator[tuple[Scene, Budget]]:
        yield SCENES[0], Budget(GPUS["H100"], [])
        raise OSError("no disassembler")

    monkeypatch.setattr(at_hand, "budgets", fail)
    simulated, problem = at_hand.simulated_steps(SCENES, GPUS["H100"], None, makes=True)
    assert (list(simulated), problem) == ([SCENES[0]], "OSError: no disassembler")


def test_measuring_does_not_wait_for_what_is_not_simulated(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    kept.append(file, kept.Kept(SCENES[1].name, "H100", kept.digest(), "", []))
    simulated, problem = at_hand.simulated_steps(SCENES, GPUS["H100"], file, makes=False)
    assert list(simulated) == [SCENES[1]]
    assert problem.startswith("1 of 5 steps are simulated in time")
    assert at_hand.simulated_steps(SCENES, None, file, makes=False) == ({}, "")  # a GPU that is not in the table


def test_whole_steps_have_llama_cpp_beside_them() -> None:
    plain, verify, batch = SCENES[0], SCENES[1], SCENES[3]
    steps = [
        Step(plain, 2.0, 2.5, 4.0, ""),
        Step(verify, 2.2, None, 2.4, ""),
        Step(batch, None, 8.0, None, "llama-bench has no such test"),
    ]
    _, first, second, third = step_table(steps)
    assert first.split()[-6:] == ["2.000", "2.500", "1.25", "4.000", "400", "250"]
    assert second.split()[-6:] == ["not", "measured", "-", "2.400", "-", "-"]  # tokens are those of decoding
    assert "not simulated" in third
    assert third.endswith("2000               -  llama-bench has no such test")


PROGRAM = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if given["-d"] == "512":
    sys.exit("no memory")
backends = "CUDA" if given["-ctk"] == "f16" else "CPU"
print(json.dumps([{{"avg_ts": 200.0, "backends": backends}}]))
"""


def test_llama_bench_is_asked_for_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.delenv("LLAMA_BENCH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert llama_bench.program() == str(program)
    plain, eight, _, batch, deep = llama_bench.steps(SCENES, tmp_path / "model.gguf")
    assert plain[1:] == (5.0, "")
    assert eight[1] is None
    assert eight[2] == "llama-bench failed: no memory"
    assert batch[1:] == (None, "llama-bench has no such test")
    assert deep[1:] == (None, "llama-bench failed: it computes on CPU, not on CUDA")
    arguments = llama_bench.arguments_of(SCENES[4], Path("m"))
    assert arguments is not None
    assert arguments[arguments.index("-ctk") :][:4] == ["-ctk", "q8_0", "-ctv", "q8_0"]
    assert llama_bench.milliseconds('[{"avg_ts": 400.0, "backends": "CUDA"}]', SCENES[1]) == 20.0  # 8 rows
    monkeypatch.setattr(llama_bench, "LIMIT_S", 0)
    *_, late = llama_bench.steps(SCENES, tmp_path / "model.gguf")
    assert late[1:] == (None, "llama-bench was not done after 0 s")
    program.write_text("#!/bin/sh\necho '[{}]'")
    monkeypatch.setattr(llama_bench, "LIMIT_S", 60)
    assert [note for *_, note in llama_bench.steps(SCENES[:1], tmp_path / "m")] == ["llama-bench failed: 'backends'"]


def test_the_one_command_goes_through_all_of_it_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    environment |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        ["packaging/gpu_kernels.sh", str(tmp_path), "--tiny", "simulated"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    text = (tmp_path / "simulated.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a dry run on a fake GPU" in text
    nodes, steps = text.split("llama.cpp: not measured: ")
    counts = re.search(r"nodes: (\d+) launched here, (\d+) of them simulated", nodes)
    assert counts
    assert int(counts[1]) == int(counts[2]) > 5  # each launch is one that was simulated
    for name in ("packed_kernel 4 bits", "decode_kernel 512x256 4 bits", "attend_chunks", "write_kv_kernel"):
        line = next(line for line in nodes.splitlines() if name in line)
        assert "not measured" in line
        assert line.endswith(("latency", "dram"))
    assert "not launched" not in nodes
    assert steps.startswith("no llama-bench")
    assert "decode, a tiny model" in steps
    assert "failed" not in text
    assert (tmp_path / "simulated.jsonl").exists()
