"""`edgelm doctor` and `edgelm config`: what they say of a healthy machine, and of what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgelm.commands import doctor
from edgelm.errors import EngineError
from edgelm.executors.machine import MachineFacts


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(doctor.machine, "facts", lambda *_, **__: MachineFacts(canary="ok"))
    return tmp_path


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, doctor.Finding]]:
    code = doctor.show_health(as_json=True)
    findings = json.loads(capsys.readouterr().out)["findings"]
    return code, {each["topic"]: doctor.Finding(**each) for each in findings}


def test_a_healthy_machine_has_no_problem(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys)
    assert code == 0
    assert {each.state for each in found.values()} <= {"ok", "note"}
    assert set(found) >= {
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
    assert "llama-cpp-python" in found["packages"].text
    assert "physical cores" in found["processor"].text
    assert found["model hub"].state == "note"


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
    code, found = report(capsys)
    assert code == 1
    problems = {topic: each for topic, each in found.items() if each.state == "problem"}
    assert set(problems) == {"settings", "data folder", "memory", "llama.cpp"}
    assert all(each.hint for each in problems.values())


def test_unsafe_kernels_are_a_problem_with_a_remedy(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.machine, "facts", lambda *_, **__: MachineFacts(canary="no_repack", reason="crashes"))
    _, found = report(capsys)
    assert found["canary"].state == "problem"
    assert "reinstall" in found["canary"].hint


def test_the_report_for_people_has_one_line_each(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show_health(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(doctor.examine()))
    assert all(line[0] in "✓•✗" for line in lines)


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
