"""`edgelm doctor` and `edgelm config`: their reports on a healthy machine, and on one with problems."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edgelm.backends import tuned
from edgelm.backends.gpu_check import GpuVerdict, OpVerdict
from edgelm.backends.kept_trials import Speed, Trial
from edgelm.backends.llama.placement import Device
from edgelm.backends.questions import LlamaBuild
from edgelm.base.errors import EdgeLMError, EngineError
from edgelm.base.machine.facts import MachineFacts
from edgelm.base.machine.gpu import CudaState, Gpu, StandingGpu
from edgelm.base.places import Places
from edgelm.commands import doctor, doctor_gpu
from edgelm.commands.doctor_engines import Engines


@pytest.fixture
def places(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(doctor.machine, "facts", lambda *_, **__: MachineFacts(canary="ok"))
    return home


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, doctor.Finding]]:
    code = doctor.show_health(as_json=True)
    rows = json.loads(capsys.readouterr().out)["findings"]
    return code, {row["topic"]: doctor.Finding(**row) for row in rows}


def test_a_healthy_machine_has_no_problem(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = report(capsys)
    assert code == 0
    assert {finding.state for finding in findings.values()} <= {"ok", "note"}
    assert set(findings) >= {
        "edgelm",
        "packages",
        "settings",
        "processor",
        "memory",
        "llama.cpp",
        "canary",
        "GPU",
        "model hub",
    }
    assert "llama-cpp-python" in findings["packages"].text
    assert "physical cores" in findings["processor"].text
    assert findings["model hub"].state == "note"


def test_the_gpus_of_llama_cpp_are_named_or_how_to_get_one() -> None:
    assert all(name in doctor.llama_gpus([]).text for name in ("none", "edgelm[cuda]", "Metal", "edgelm[vulkan]"))
    problem = doctor.llama_gpus([], "edgelm-llama-vulkan finds no GPU; install its driver")
    assert (problem.state, problem.text) == ("note", "edgelm-llama-vulkan finds no GPU; install its driver")
    card = Device("Vulkan0", "AMD Radeon", 8 * 2**30, 6 * 2**30)
    assert doctor.llama_gpus([card]).text.startswith("Vulkan0 is AMD Radeon, 6.0 of 8.0 GiB free; --device gpu")
    ours = doctor.llama_gpus([], card=StandingGpu("NVIDIA GeForce RTX 3060"))
    assert ours.text.startswith("none; for llama.cpp on NVIDIA GeForce RTX 3060 ")
    assert "[cuda]" not in ours.text, "it may be there already"


def test_a_gpu_says_whether_kernels_are_tuned_for_it(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_cuda", lambda: CudaState("", "", "NVIDIA H100", 80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(tuned, "version", lambda _: "3.9.0")
    here = Places({"EDGELM_CACHE_DIR": str(places / "cache")})
    assert doctor._gpu(here, Engines()).text.endswith(
        "no kernels are tuned for it: --tune does that while a model is loaded"
    )
    file = here.cache / "kernels" / "nvidia-h100-132sm-triton3.9.0-3.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"matmul": {"a": {"warps": 4}, "b": {"warps": 8}}, "unfinished": {"matmul c": {"times": 1}}}')
    assert doctor._gpu(here, Engines()).text == (
        "our own kernels run on NVIDIA H100, 80.0 of 80.0 GiB free; `edgelm doctor --gpu` checks them; "
        "2 kernels are tuned for it"
    )


@pytest.mark.parametrize(("has_llama_gpu", "where"), [(False, "on the processor"), (True, "by llama.cpp on its GPU")])
def test_without_a_card_of_nvidia_it_says_where_models_run(
    places: Path, monkeypatch: pytest.MonkeyPatch, has_llama_gpu: bool, where: str
) -> None:
    monkeypatch.setattr(doctor, "standing_gpu", lambda: None)
    monkeypatch.setattr(doctor, "ask_cuda", lambda: CudaState("no NVIDIA GPU was found"))
    found = doctor._gpu(Places({}), Engines(has_llama_gpu=has_llama_gpu))
    assert found.text == f"no NVIDIA GPU was found; models run {where}"


def test_of_two_gpus_it_names_the_one_that_our_kernels_run_on(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_cuda", lambda: CudaState("", "", "RTX 3060", 11 * 2**30, 12 * 2**30))
    gpus = [Gpu("RTX 4090", 24 * 2**30, 4 * 2**30, "580.65"), Gpu("RTX 3060", 12 * 2**30, 11 * 2**30, "580.65")]
    monkeypatch.setattr(doctor, "usable_gpus", lambda: gpus)
    text = doctor._gpu(Places({"EDGELM_CACHE_DIR": str(places / "cache")}), Engines()).text
    assert text.startswith("our own kernels run on RTX 3060, 11.0 of 12.0 GiB free, driver 580.65; ")
    assert "they use one GPU, and not RTX 4090 (4.0 GiB free): CUDA_VISIBLE_DEVICES chooses" in text


def test_each_problem_says_what_to_do(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (places / "config").mkdir()
    (places / "config" / "config.toml").write_text("ctx = 0")
    (places / "data").write_text("a file where the folder should be")
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(doctor.os, "access", lambda path, _: path != places / "data")

    def fail(*_: object, **__: object) -> MachineFacts:
        raise EngineError("llama.cpp crashes here", "reinstall it")

    monkeypatch.setattr(doctor.machine, "facts", fail)
    code, findings = report(capsys)
    assert code == 1
    problems = {topic: finding for topic, finding in findings.items() if finding.state == "problem"}
    assert set(problems) == {"settings", "data folder", "memory", "llama.cpp"}
    assert all(finding.hint for finding in problems.values())


def test_unsafe_kernels_are_a_problem_with_a_remedy(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.machine, "facts", lambda *_, **__: MachineFacts(canary="no_repack", reason="crashes"))
    _, findings = report(capsys)
    assert findings["canary"].state == "problem"
    assert "reinstall" in findings["canary"].hint


@pytest.mark.parametrize(
    ("facts", "features", "buffers", "switched_off", "state", "text"),
    [
        (MachineFacts(canary="ok"), ["AMX_INT8"], ["AMX", "CPU_REPACK"], False, "ok", "used for prompts"),
        (MachineFacts(canary="ok"), ["AMX_INT8"], ["CPU_REPACK"], True, "note", "EDGELM_NO_AMX"),
        (MachineFacts(canary="ok"), ["AMX_INT8"], ["CPU_REPACK"], False, "note", "the system does not allow it"),
        (MachineFacts(canary="ok"), ["AVX512"], ["CPU_REPACK"], False, "note", "compiled without it"),
        (MachineFacts(canary="no_amx", reason="crashes"), ["AMX_INT8"], ["AMX"], False, "problem", "llama.cpp crashes"),
        (MachineFacts(canary="no_repack", reason="x"), ["AMX_INT8"], ["AMX"], False, "note", "see canary"),
    ],
)
def test_amx_is_reported_where_the_processor_has_it(
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    facts: MachineFacts,
    features: list[str],
    buffers: list[str],
    switched_off: bool,
    state: str,
    text: str,
) -> None:
    build = LlamaBuild("0.5", tuple(features), (), "edgelm-llama 1", "libggml-cpu.so", tuple(buffers))
    monkeypatch.setattr(doctor, "ask_llama_build", lambda: build)
    monkeypatch.setattr(doctor.machine, "facts", lambda *_, **__: facts)
    if switched_off:
        monkeypatch.setenv("EDGELM_NO_AMX", "1")
    monkeypatch.setattr(doctor.machine, "has_amx", lambda: True)
    found = report(capsys)[1]["AMX"]
    assert (found.state, text in found.text) == (state, True)
    assert bool(found.hint) == (state == "problem")
    monkeypatch.setattr(doctor.machine, "has_amx", lambda: False)
    assert "AMX" not in report(capsys)[1]


def test_the_report_for_people_has_one_line_each(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show_health(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    count = len(list(doctor.examine()))
    assert all(line[0] in "✓•✗" for line in lines[:count])
    table = "\n".join(lines[count:])
    assert all(text in table for text in ("CUDA", "any other GGUF", "gemma3n", "here"))


def test_settings_are_shown_with_their_source_and_secrets_are_not(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgelm.commands.config import show_config

    monkeypatch.setenv("EDGELM_API_KEY", "sesame")
    monkeypatch.setenv("EDGELM_TOP_K", "7")
    show_config(as_json=True)
    out = capsys.readouterr().out
    assert "sesame" not in out
    rows = json.loads(out)["settings"]
    assert rows["top_k"] == {"value": 7, "source": "EDGELM_TOP_K"}
    assert rows["api_key"] == {"value": "hidden", "source": "EDGELM_API_KEY"}
    assert rows["ctx"]["source"] == "default"


@pytest.mark.parametrize(
    ("release", "folder", "state"),
    [
        ("6.6.87.2-microsoft-standard-WSL2", "/mnt/c/Users/a/models", "problem"),
        ("6.6.87.2-microsoft-standard-WSL2", "/mnt/models", "ok"),
        ("6.6.87.2-microsoft-standard-WSL2", "/home/a/models", "ok"),
        ("6.1.0-amd64", "/mnt/c/models", None),
    ],
)
def test_models_on_a_drive_of_windows(release: str, folder: str, state: str | None) -> None:
    assert [finding.state for finding in doctor.wsl_findings(release, [Path(folder)])] == ([state] if state else [])


# -- doctor --gpu ------------------------------------------------------------------------------------------------------

CARD = Device("CUDA0", "NVIDIA GeForce RTX 3060", 12 * 2**30, 11 * 2**30)
TRIAL = Trial(torch=Speed(2000, 60), llama=Speed(1500, 50))


def no_trial(*_: object) -> Trial:
    raise EdgeLMError("the trial of the engines cannot be made: No space left on device", "free some space")


def no_llama() -> tuple[Device, ...]:
    raise EngineError("llama.cpp is not installed")


@pytest.mark.parametrize(
    ("devices", "make", "line"),
    [
        (lambda: (CARD,), lambda *_: TRIAL, "--engine auto takes our own kernels\n"),
        (lambda: (), no_trial, None),
        (lambda: (replace(CARD, shared=True),), no_trial, None),
        (lambda: (CARD,), no_trial, "both engines were not tried: the trial of the engines cannot be made: No space"),
        (no_llama, no_trial, "both engines were not tried: llama.cpp is not installed\n"),
    ],
    ids=["tried", "no GPU of llama.cpp", "in the processor", "no space", "no llama.cpp"],
)
@pytest.mark.usefixtures("places")
def test_the_check_of_a_gpu_tries_both_engines_and_writes_its_report_in_any_case(
    devices: Callable[[], tuple[Device, ...]],
    make: Callable[..., Trial],
    line: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor_gpu, "ask_cuda", lambda: CudaState("", "", "GPU X", 2**33, 2**33))
    out = tmp_path / "report.txt"
    verdict = GpuVerdict("GPU X", verdicts=(OpVerdict("norm", "64, 1 row"),))
    assert doctor_gpu.check_gpu(None, str(out), lambda *_: verdict, make, devices) == 0
    said = capsys.readouterr().out
    assert "✓ norm" in out.read_text()
    assert line in said if line else "tried" not in said and "--engine auto" not in said
