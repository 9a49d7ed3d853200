"""The check of a GPU's kernels: what it finds, what it costs when a kernel crashes or hangs, and what is kept of it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import edgelm.backends.torch.build as torch_build
from edgelm.backends import gpu_check, kept_verdicts
from edgelm.backends.gpu_check import NO_NUMBER, PDL, CheckGpu, GpuVerdict, OpVerdict, run_check
from edgelm.backends.kept_verdicts import keep, kept_verdict
from edgelm.backends.llama.random_gguf import ALL_QUANTS
from edgelm.backends.model import open_model
from edgelm.backends.torch import check_worker, kept_checks, self_check
from edgelm.backends.torch.check_bounds import Bound
from edgelm.backends.torch.executor import TorchExecutor
from edgelm.backends.torch.kept_checks import check_key, kept_problem, kept_reasons, verdict_for
from edgelm.backends.torch.self_check import Comparison, described, difference_of, layers_to_try
from edgelm.backends.torch.trial import run_trial
from edgelm.base.config import Settings
from edgelm.base.errors import DeviceError, EngineError
from edgelm.base.machine.gpu import CudaState
from edgelm.commands import doctor_gpu
from edgelm.engine.core import Masks, PendingSamples, Step
from edgelm.kernels.choice import PLAIN_OPS, Implementation, observed_by, preferred
from edgelm.kernels.dequant_gemm import SCRATCH_ROWS, by_slices
from edgelm.kernels.matmul import ROWS, Lengths
from edgelm.models.config import read_config
from edgelm.models.loading.stored import BLOCK_TYPES, PLAIN_TYPES
from tests.tiny import write_tiny

LIMIT_S = 300
ROOT = Path(__file__).resolve().parents[3]
STAND_IN = """
import json, os, sys, time
request = json.loads(sys.stdin.readline())
def emit(**event): print(json.dumps(event), flush=True)
def count(kernels, model=1, models=1): emit(event="counted", kernels=kernels, model=model, models=models)
def begin(op): emit(event="begun", op=op, detail="q4_k 64x64, 1 row")
def end(*wrong): emit(event="checked", device="GPU X", verdicts=[{"op": "norm", "detail": "64, 1 row", "right": True}])
"""


def simulated(*fault: str) -> tuple[str, ...]:
    return sys.executable, "-m", "tests.backends.torch.simulated_gpu", *fault


def stand_in(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", STAND_IN + program


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # as small as possible: the interpreter runs the programs of a launch one after another
    return write_tiny(
        folder / "m.gguf", quant="q8_0", width=32, ffn=32, heads=2, kv_heads=1, head_dim=32, layers=1, vocab_size=288
    )


# -- on a simulated GPU ------------------------------------------------------------------------------------------------


def test_one_wrong_kernel_is_found_and_all_others_are_right(model: Path) -> None:
    lines: list[str] = []
    verdict = run_check(CheckGpu(model, ("k8v4",), "off"), lines.append, command=simulated("wrong:rms_norm"))
    assert verdict.problem == ""
    assert set(verdict.wrong) == {"rms_norm"}
    assert "is off by 0.5 of the largest value" in verdict.wrong["rms_norm"]
    assert {"matmul", "attention", "write_kv", "embedding", "sample"} <= {
        one.op for one in verdict.verdicts if one.right
    }
    assert any("k8v4, heads of 32" in one.detail for one in verdict.verdicts)
    assert any("q8_0 64x32 gated" in one.detail for one in verdict.verdicts)
    places = [re.search(r"kernels: (\d+) of (\d+), ", line) for line in lines if "checking the GPU's kernels" in line]
    numbers = [(int(place[1]), int(place[2])) for place in places if place]
    assert len(places) - len(numbers) <= 1, "a chain of kernels comes before the model's"
    assert numbers == [(number, len(numbers)) for number in range(1, len(numbers) + 1)], "the total is known beforehand"


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    command = [sys.executable, "-m", "tests.backends.torch.triton_failures"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    messages: dict[str, str] = {}
    for line in done.stdout.splitlines():
        messages |= json.loads(line)
    return messages


@pytest.mark.parametrize(
    ("case", "said"),
    {
        "sm_90": "",
        "sm_130": "cannot compile for",
        "no compiler": "needs a C compiler, and there is none; `sudo apt install build-essential`",
        "no such compiler": "cannot start /nonexistent/cc",
        "noexec": "cannot load what it compiled",
        "no headers": "Python.h is not there; `sudo apt install python3-dev`",
    }.items(),
)
def test_real_failures_of_the_compiler_are_named(failures: dict[str, str], case: str, said: str) -> None:
    assert said in failures[case]
    assert bool(failures[case]) is bool(said)


def test_a_gpu_that_another_process_has_alone_is_no_lasting_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """In compute mode EXCLUSIVE_PROCESS it is the engine that waits for the check. A DeviceError is kept for a day."""

    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore lines")

    monkeypatch.setattr(torch, "arange", fail)
    with pytest.raises(EngineError) as caught:
        run_trial(torch.device("cpu"))
    assert not isinstance(caught.value, DeviceError)
    assert caught.value.message == "the GPU cannot be used by another process now"
    assert "EXCLUSIVE_PROCESS" in caught.value.hint
    assert "nvidia-smi -c 0" in caught.value.hint


def test_without_a_model_every_op_is_tried_and_the_experts_in_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch computes all of it: the interpreter would take minutes."""
    tried: dict[str, set[str]] = {}
    finished: set[str] = set()  # products that finish the norm before them

    def observe(_: Comparison, op: str, __: Implementation, plain: Implementation, args: Sequence[Any]) -> Any:
        tried.setdefault(op, set()).add(described(args))
        if any(isinstance(arg, Lengths) for arg in args):
            finished.add(described(args))
        return plain

    monkeypatch.setattr(Comparison, "observe", observe)
    monkeypatch.setitem(check_worker.DTYPES, "cpu", check_worker.DTYPES["cuda"])
    child = SimpleNamespace(send=lambda _: None)
    request = CheckGpu(None, ("f16",), "off")
    check_worker.check(request, child, device=torch.device("cpu"), trial=lambda _: None, width=256)
    sources = [path.read_text() for path in (ROOT / "kernels").glob("*/__init__.py")]
    ops = {op for source in sources for op in re.findall(r'(?:dispatch|choose)\(\s*"(\w+)"', source)}
    assert len(ops) > 10
    # matmul's kernel calls these two for the rows of a prompt
    assert set(tried) == ops - {"dequant_gemm", "dequantize"}
    assert by_slices(self_check.LONG_PROMPT)
    assert ROWS < self_check.PROMPTS[0] < SCRATCH_ROWS
    rows = {int(detail.split()[-2]) for detail in tried["matmul"]}
    assert rows >= {1, self_check.PROMPTS[0], self_check.LONG_PROMPT}
    assert {"gated" in detail for detail in finished} == {True, False}
    formats = {detail.split()[0] for detail in tried["grouped_matmul"]}
    known = [quant.name for quant in ALL_QUANTS if quant.name in BLOCK_TYPES or quant.name in PLAIN_TYPES]
    assert len(formats) >= len(known) - 1, "two plain types may be one format"
    assert any("gated" in detail for detail in tried["grouped_matmul"])


# -- crashes, hangs, errors --------------------------------------------------------------------------------------------

REQUEST = CheckGpu(Path("m.gguf"), ("f16",), "off")


@pytest.mark.parametrize(("short", "once"), [(True, ", once for a kind of model"), (False, "")])
def test_whoever_waits_for_a_load_is_told_that_the_check_is_made_once(short: bool, once: str) -> None:
    lines: list[str] = []
    program = (
        "begin('')\nbegin('chain')\ncount(2)\nbegin('matmul')\nbegin('norm')\ncount(9, 2, 3)\nbegin('matmul')\nend()"
    )
    run_check(replace(REQUEST, short=short), lines.append, command=stand_in(program))
    assert lines == [
        f"checking the GPU{once}: a first kernel is compiled and tried",
        f"checking the GPU's kernels{once}: chain of q4_k 64x64, 1 row",
        f"checking the GPU's kernels{once}: 1 of 2, matmul of q4_k 64x64, 1 row",
        f"checking the GPU's kernels{once}: 2 of 2, norm of q4_k 64x64, 1 row",
        f"checking the GPU's kernels{once}: 1 of 9 of model 2 of 3, matmul of q4_k 64x64, 1 row",
    ]


def test_a_crash_costs_the_op_and_the_others_are_checked_again() -> None:
    program = (
        "begin('matmul') if 'matmul' not in request['plain'] else end()\nos.abort() if not request['plain'] else 0"
    )
    verdict = run_check(REQUEST, command=stand_in(program))
    assert verdict.device == "GPU X"
    assert verdict.wrong == {"matmul": "crashes: its process was killed by SIGABRT (q4_k 64x64, 1 row)"}
    assert [one.op for one in verdict.verdicts] == ["norm", "matmul"]


def test_a_hang_costs_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "OP_S", 1.0)
    program = "begin('attention'); time.sleep(3600) if not request['plain'] else end()"
    verdict = run_check(REQUEST, command=stand_in(program))
    assert verdict.wrong == {"attention": "hangs: it is not done after 1 s (q4_k 64x64, 1 row)"}


def test_kernels_are_launched_without_pdl_where_it_fails() -> None:
    failed = "emit(event='failed', message='the GPU failed', hint='', kind='DeviceError')"
    program = f"begin({PDL!r}) if not request['plain'] else end()\n{failed} if not request['plain'] else 0"
    verdict = run_check(REQUEST, command=stand_in(program))
    assert verdict.problem == ""
    assert verdict.wrong == {PDL: "fails: the GPU failed (q4_k 64x64, 1 row)"}
    assert verdict.reasons == (f"each kernel waits for the end of the one before it: {PDL} {verdict.wrong[PDL]}",)


@pytest.mark.parametrize("right", [True, False])
def test_a_chain_that_is_wrong_turns_pdl_off_before_any_op_is_tried(
    model: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("edgelm.kernels.pdl.uses_pdl", lambda: PDL not in PLAIN_OPS)
    monkeypatch.setattr(check_worker, "chain_is_right", lambda _: right)
    without: list[bool] = []
    monkeypatch.setattr(check_worker, "check_model", lambda *_, **__: without.append(PDL in PLAIN_OPS) or [])
    sent: list[Any] = []
    try:
        for request in (CheckGpu(model, ("f16",), "off"), CheckGpu(model, ("f16",), "off", plain=(PDL,))):
            PLAIN_OPS.clear()
            check_worker.check(request, SimpleNamespace(send=sent.append), torch.device("cpu"), lambda _: None)
    finally:
        PLAIN_OPS.clear()
    first, second = (message.verdicts for message in sent if isinstance(message, gpu_check.Checked))
    assert [(verdict.op, verdict.right) for verdict in first] == [(PDL, right)]
    assert [message.op for message in sent[:3]] == ["", PDL, ""]  # loading the model is no part of the chain
    assert second == ()
    assert without == [not right, True]


DAMAGED = "emit(event='failed', message='no cubin', hint='remove it', kind='CompiledKernelError')"


@pytest.mark.parametrize("current", ["", PDL, "matmul"])
def test_where_triton_cannot_read_its_cache_all_is_compiled_anew(current: str) -> None:
    """Such a cache says nothing about a kernel: no op, and no chain of them, is kept as wrong."""
    program = f"begin({current!r})\nend() if os.environ.get('TRITON_ALWAYS_COMPILE') else {DAMAGED}"
    verdict = run_check(REQUEST, command=stand_in(program))
    assert (verdict.problem, verdict.wrong) == ("", {})
    verdict = run_check(REQUEST, command=stand_in(f"begin({current!r})\n{DAMAGED}"))
    assert (verdict.problem, verdict.hint, verdict.lasts) == ("no cubin", "remove it", False)


def test_a_gpu_on_which_much_crashes_is_not_used() -> None:
    program = "begin(['a', 'b', 'c', 'd'][len(request['plain'])]); os.abort()"
    verdict = run_check(REQUEST, command=stand_in(program))
    assert verdict.problem == "kernels fail on this GPU: a, b, c"
    assert verdict.hint == "use --engine llama"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("begin(''); os.abort()", "a small kernel crashes: its process was killed by SIGABRT on this GPU"),
        ("emit(event='failed', message='no compiler', hint='get one', kind='DeviceError')", "no compiler"),
    ],
)
def test_without_a_working_kernel_nothing_runs(program: str, problem: str) -> None:
    assert run_check(REQUEST, command=stand_in(program)).problem == problem


# -- the comparison ----------------------------------------------------------------------------------------------------


def test_a_difference_counts_what_is_not_a_number() -> None:
    want = torch.tensor([1.0, -4.0, math.inf])
    assert difference_of(want, want).largest == 0
    assert difference_of(torch.tensor([1.0, -3.0, math.inf]), want).largest == 0.25
    assert difference_of(torch.tensor([1.0, math.nan, math.inf]), want).largest == math.inf
    assert difference_of(torch.tensor([1.0, -4.0, 7.0]), want).largest == math.inf
    assert difference_of(torch.tensor([math.nan]), torch.tensor([math.nan])).largest == 0
    assert difference_of(torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 4])).largest == 0.25
    assert difference_of(torch.zeros(3), torch.zeros(3)).largest == 0
    assert difference_of(want, want, Bound(torch.tensor([0.0, math.nan, math.nan]))).within
    assert not difference_of(torch.tensor([1.0, -3.9, math.inf]), want, Bound(torch.full((3,), 0.05))).within


def test_layers_of_each_kind_are_tried(tmp_path: Path) -> None:
    with open_model(write_tiny(tmp_path / "m.gguf", quant="q8_0", layers=3)) as model:
        assert model.gguf is not None
        config = read_config(model.gguf.metadata)
        assert layers_to_try(config, model.gguf) == [0, 0]
        (layer,) = set(config.layers)
        far, near = replace(layer, window=0), replace(layer, window=64)
        for kinds, tried in (("fnf", [0, 0, 1, 1, 0]), ("fnn", [0, 0, 1, 1]), ("f", [0, 0])):
            layers = tuple({"f": far, "n": near}[kind] for kind in kinds)
            assert layers_to_try(replace(config, layers=layers), None) == tried


def test_all_products_of_a_step_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that only layers in the middle of a model have: they finish a norm and prepare the next one."""
    path = write_tiny(
        tmp_path / "m.gguf", quant="q8_0", width=32, ffn=96, heads=2, kv_heads=1, head_dim=32, layers=3, vocab_size=288
    )
    tried: set[tuple[str, str, bool]] = set()

    def observe(self: Comparison, op: str, _: Implementation, plain: Implementation, args: Sequence[Any]) -> Any:
        key = op, described(args)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        if count <= self_check.MAX_COMPARED:
            tried.add((*key, any(isinstance(arg, Lengths) for arg in args)))
        return plain

    def of_a_check() -> set[tuple[str, str, bool]]:
        tried.clear()
        with open_model(path) as model:
            self_check.check_model(model, torch.device("cpu"), torch.bfloat16, ["f16"])
        return set(tried)

    monkeypatch.setattr(Comparison, "observe", observe)
    compared = of_a_check()
    assert {op for op, _, finishes in compared if finishes} == {"matmul"}
    monkeypatch.setattr(self_check, "layers_to_try", lambda *_: range(3))
    monkeypatch.setattr(self_check, "MAX_COMPARED", 100)
    assert of_a_check() == compared


@pytest.mark.parametrize("is_late", [False, True])
def test_graphs_are_compared_with_a_token_that_only_the_device_knows(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    class Replayed(TorchExecutor):
        """Its next step reads the sampled token, or what was there before."""

        def sample(self, step: Step, masks: Masks | None) -> PendingSamples:
            before = self._host_tokens.clone()
            samples = super().sample(step, masks)
            if is_late:
                self._host_tokens.copy_(before.clamp(min=0))
            return samples

    monkeypatch.setattr(self_check, "TorchExecutor", Replayed)
    comparison = Comparison(lambda *_: None)
    with open_model(model) as opened, observed_by(lambda op, kernel, plain, args: plain), torch.inference_mode():
        decoder = self_check._some_layers(opened, torch.device("cpu"), torch.float32, "off")[0]
        plain = TorchExecutor(decoder, self_check._options("f16"))
        self_check._check_graph(decoder, "f16", plain, comparison)
    (verdict,) = comparison.verdicts.values()
    assert (verdict.op, verdict.detail, verdict.error) == (self_check.GRAPHS, "f16", "")
    assert verdict.right != is_late
    assert (verdict.off > 0.01) == is_late


# -- what is kept, and what follows ------------------------------------------------------------------------------------

WRONG = OpVerdict("attention", "f16, heads of 64", right=False, off=0.3)


def test_a_verdict_is_kept_for_what_it_was_made_for(model: Path, tmp_path: Path) -> None:
    settings = Settings(kv="f16")
    with open_model(model) as opened:
        asked: list[str] = []
        command = stand_in("end()")
        first = verdict_for(opened, settings, "f16", tmp_path, asked.append, command=command)
        again = verdict_for(opened, settings, "f16", tmp_path, asked.append, command=stand_in("os.abort()"))
        assert first.device == again.device == "GPU X"
        assert asked == ["checking the kernels on this GPU, once for a kind of model"]
        assert check_key(opened, settings, "f16") != check_key(opened, settings, "k8v4")
        key = check_key(opened, settings, "f16")
        keep(tmp_path, key, GpuVerdict("GPU X", verdicts=(WRONG,)))
        assert kept_reasons(opened, settings, tmp_path) == (
            "attention is computed by plain torch: its kernel is off by 0.3 of the largest value (f16, heads of 64)",
        )


@pytest.mark.parametrize(
    "verdict", [GpuVerdict(problem="no memory"), GpuVerdict("GPU X", verdicts=(OpVerdict("a", "b", unknown=True),))]
)
def test_what_may_change_is_not_kept(verdict: GpuVerdict, tmp_path: Path) -> None:
    keep(tmp_path, "key", verdict)
    assert kept_verdict(tmp_path, "key") is None


def test_a_gpu_without_working_kernels_is_tried_again_after_a_day(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(kv="f16")
    failing = stand_in("emit(event='failed', message='no compiler', hint='get one', kind='DeviceError')")
    with open_model(model) as opened:
        assert kept_reasons(opened, settings, tmp_path) == (
            "its kernels are not checked on this GPU yet: that is done before its first use",
        )
        asked: list[str] = []
        for command in (failing, stand_in("os.abort()")):
            verdict = verdict_for(opened, settings, "f16", tmp_path, asked.append, command=command)
            assert (verdict.problem, verdict.hint) == ("no compiler", "get one")
        assert len(asked) == 1
        assert kept_problem(opened, settings, tmp_path) == "no compiler (`edgelm doctor --gpu` checks it again)"
        monkeypatch.setattr(kept_verdicts, "PROBLEM_S", 0.0)
        assert kept_problem(opened, settings, tmp_path) == ""
        monkeypatch.undo()
        kept_verdicts.forget_problems(tmp_path)
        assert verdict_for(opened, settings, "f16", tmp_path, asked.append, command=stand_in("end()")).problem == ""


def test_a_wrong_op_is_plain_torch_and_a_broken_gpu_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [GpuVerdict("GPU X", verdicts=(WRONG,)), GpuVerdict(problem="no compiler", hint="get one")]
    monkeypatch.setattr(torch_build, "verdict_for", lambda *_: verdicts.pop(0))
    monkeypatch.setattr(kept_checks, "_gpus", list)
    try:
        with open_model(model) as opened:
            torch_build.check_ops(opened, Settings(), "f16")
            assert preferred("attention", "triton") == "reference"
            assert preferred("matmul", "triton") == "triton"
            with pytest.raises(DeviceError, match="no compiler; get one"):
                torch_build.check_ops(opened, Settings(), "f16")
    finally:
        PLAIN_OPS.clear()


# -- edgelm doctor --gpu -----------------------------------------------------------------------------------------------


def test_doctor_writes_a_report_without_folders(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = f"fails: {Path.home()}/.triton/cache/x.c is not there"
    verdicts = (
        OpVerdict("norm", "64, 1 row"),
        WRONG,
        OpVerdict("matmul", "q", right=False, off=NO_NUMBER, error=error),
    )
    monkeypatch.setattr(doctor_gpu, "ask_cuda", lambda: CudaState("", "", "GPU X", 2**33, 2**33))
    monkeypatch.setenv("EDGELM_CACHE_DIR", str(tmp_path / "cache"))
    keep(tmp_path / "cache", "key", GpuVerdict(problem="no compiler", lasts=True))
    assert kept_verdict(tmp_path / "cache", "key") is not None
    out = tmp_path / "report.txt"
    code = doctor_gpu.check_gpu(str(model), str(out), run=lambda *_: GpuVerdict("GPU X", verdicts=verdicts, took_s=3.2))
    said, written = capsys.readouterr().out, out.read_text()
    assert code == 1
    assert kept_verdict(tmp_path / "cache", "key") is None
    assert "✓ norm: right in 1 case," in said
    assert "✗ attention: is off by 0.3 of the largest value, in 1 of 1 case, first f16, heads of 64" in said
    assert "WRONG\tattention\tf16, heads of 64\tis off by 0.3 of the largest value" in written
    assert "m.gguf" in written
    assert str(Path.home()) + "/" not in written
    assert str(tmp_path) not in written


def test_doctor_says_why_there_is_nothing_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_gpu, "ask_cuda", lambda: CudaState("no NVIDIA driver was found"))
    assert doctor_gpu.check_gpu(None, str(tmp_path / "report.txt"), run=lambda *_: pytest.fail("it is not run")) == 1
    assert "our kernels cannot be used here: no NVIDIA driver was found" in capsys.readouterr().out
    assert "no NVIDIA driver was found" in (tmp_path / "report.txt").read_text()
