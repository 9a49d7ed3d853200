"""`edgelm list`: a row for each model, in whatever state its file is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgelm.commands.list import age_text, list_models, parameters_text
from edgelm.library.readers import Describe, read_each
from edgelm.library.scan import note_use
from tests.checkpoints.safetensors_bytes import folder_files
from tests.library.hub_folders import FIRST, put, put_part
from tests.tiny import write_tiny

QWEN = "Qwen/Qwen3-4B-GGUF"
LIMIT_S = 60


def rows(capsys: pytest.CaptureFixture[str], **flags: object) -> dict[str, dict[str, Any]]:
    list_models(flags, as_json=True)
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_json_has_the_documented_fields(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_tiny(home / "tiny.gguf", quant="q8_0", context=777).read_bytes()
    snapshot = put(home / "hub", QWEN, {"Qwen3-4B-Q4_K_M.gguf": data})
    note_use(home / "data", snapshot / "Qwen3-4B-Q4_K_M.gguf")
    by_name = rows(capsys)
    assert set(by_name) == {"starter", "qwen3:4b"}
    row = by_name["qwen3:4b"]
    assert (
        row.items()
        >= {
            "name": "qwen3:4b",
            "path": str(snapshot / "Qwen3-4B-Q4_K_M.gguf"),
            "format": "gguf",
            "architecture": "llama",
            "quantization": "Q8_0",
            "bytes": len(data),
            "context": 777,
            "place": "hub",
            "repository": QWEN,
            "revision": FIRST,
            "error": None,
        }.items()
    )
    assert row["parameters"] > 100_000
    assert row["last_used"].endswith("+00:00")
    assert by_name["starter"]["last_used"] is None


def test_folders_of_safetensors_and_of_the_settings(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(home / "hub", "own/s", folder_files())
    mine = home / "mine"
    mine.mkdir()
    write_tiny(mine / "own-Q8_0.gguf")
    by_name = rows(capsys, model_dirs=[str(mine)])
    assert by_name["own/s"]["format"] == "safetensors"
    assert by_name["own/s"]["architecture"] == "llama"
    assert by_name["own/s"]["bytes"] == sum(map(len, folder_files().values()))
    assert by_name["own-Q8_0"]["place"] == "folder"
    assert rows(capsys).keys() == {"starter", "own/s"}


def test_an_unreadable_model_has_a_row_with_the_reason(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_tiny(home / "tiny.gguf").read_bytes()
    whole = {"good-Q4_0.gguf": data, "z-last-Q2_K.gguf": write_tiny(home / "2.gguf", seed=2).read_bytes()}
    snapshot = put(
        home / "hub", "own/m", whole | {"cut-Q5_0.gguf": data[:9000], "empty-F16.gguf": b"", "web-F32.gguf": b"<html>"}
    )
    (snapshot / "broken-BF16.gguf").symlink_to("gone")
    by_name = rows(capsys)
    assert {name for name, row in by_name.items() if row["error"]} == {"own/m:Q5_0", "own/m:F16", "own/m:F32"}
    assert "cut short" in by_name["own/m:Q5_0"]["error"]
    assert by_name["own/m:Q5_0"]["bytes"] == 9000
    assert by_name["own/m:Q2_K"]["architecture"] == "llama"
    list_models({}, as_json=False)
    out = capsys.readouterr()
    assert len(out.out.splitlines()) == 1 + len(by_name)
    assert "own/m:F32: web-F32.gguf is not a GGUF file: it is a web page" in out.err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may deliver another signal")
def test_a_file_that_kills_its_reader_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    files = [Describe(write_tiny(tmp_path / f"{name}.gguf")) for name in ("first", "cut", "slow", "last")]
    answers = list(read_each(files, limit_s=5, module="tests.cutting_reader"))
    assert answers[0]["architecture"] == answers[3]["architecture"] == "llama"
    assert answers[1] == {"error": "it cannot be read: it is cut short, or was changed while it was read"}
    assert answers[2] == {"error": "it cannot be read: nothing came within 5 s"}
    assert list(read_each([])) == []
    assert "failed" in next(read_each([Describe(Path("x"))], module="no.such.module"))["error"]


def test_the_table_for_people(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_tiny(home / "tiny.gguf").read_bytes()
    snapshot = put(home / "hub", QWEN, {"Qwen3-4B-Q4_K_M.gguf": data})
    note_use(home / "data", snapshot / "Qwen3-4B-Q4_K_M.gguf")
    monkeypatch.setenv("HOME", str(home))
    (home / "mine").mkdir()
    write_tiny(home / "mine" / "my own.gguf")
    list_models({"model_dirs": [str(home / "mine")]}, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "QUANT", "PARAMS", "CONTEXT", "LAST", "USED", "WHERE"]
    assert "part of edgelm" in lines[1]
    (line,) = [line for line in lines if line.startswith("qwen3:4b ")]
    assert "just now" in line
    assert "hub cache" in line
    (line,) = [line for line in lines if line.startswith("my own ")]
    assert "never" in line
    assert "~/mine" in line


def test_with_nothing_pulled_it_says_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_models({}, as_json=False)
    out = capsys.readouterr()
    assert "starter" in out.out
    assert "edgelm pull" in out.err


def test_a_missing_folder_is_a_note(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_models({"model_dirs": [str(home / "absent")]}, as_json=True)
    out = capsys.readouterr()
    assert json.loads(out.out)
    assert out.err == f"note: {home / 'absent'} of the setting model_dirs does not exist\n"


def test_as_a_command_with_the_setting_from_the_file_and_the_environment(home: Path) -> None:
    for name in ("one", "two"):
        (home / name).mkdir()
        write_tiny(home / name / f"{name}.gguf")
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text(f"model_dirs = ['{home / 'one'}']")

    def listed(**more: str) -> set[str]:
        command = [sys.executable, "-m", "edgelm", "list", "--json"]
        done = subprocess.run(
            command, env=os.environ | more, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return {row["name"] for row in json.loads(done.stdout)}

    assert listed() == {"starter", "one"}
    assert listed(EDGELM_MODEL_DIRS=f"{home / 'one'}{os.pathsep}{home / 'two'}") == {"starter", "one", "two"}
    (home / "config" / "config.toml").write_text("model_dirs = 3")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        listed()
    assert "a list of folders" in caught.value.stderr


def test_texts() -> None:
    assert [age_text(s) for s in (None, 3, 70, 7200, 3 * 86_400, 200 * 86_400)] == [
        *("never", "just now", "1 minute ago", "2 hours ago", "3 days ago", "6 months ago")
    ]
    assert [parameters_text(n) for n in (None, 2496, 135_000_000, 999_700_000, 4_022_000_000, 116_830_000_000)] == [
        *("?", "2,496", "135M", "1B", "4.02B", "117B")
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_an_unfinished_download_is_listed(home: Path, capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    put(home / "hub", QWEN, {"Qwen3-4B-Q8_0.gguf": b"x"})
    put_part(home / "hub", QWEN, b"a" * 3000, "Qwen3-4B-Q4_K_M.gguf")
    for i in (1, 2):
        put_part(home / "hub", "o/b", bytes([i]) * 1000, f"big/m-Q8_0-{i:05d}-of-00002.gguf")
    put_part(home / "hub", "o/s", b"s" * 5)
    list_models({}, as_json=as_json)
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("not finished")]
    assert lines == [
        "not finished: qwen3:4b, 3.00 kB so far; `edgelm pull qwen3:4b` resumes it, `edgelm rm qwen3:4b` removes it",
        "not finished: o/b:Q8_0, 2.00 kB so far; `edgelm pull o/b:Q8_0` resumes it, `edgelm rm o/b:Q8_0` removes it",
        "not finished: o/s, 5 B so far; `edgelm pull o/s` resumes it, `edgelm rm o/s` removes it",
    ]
    if as_json:
        assert {row["name"] for row in json.loads(out)} == {"starter", "qwen3:4b:Q8_0"}, "only models"


def test_a_model_with_a_projector_reads_pictures(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_tiny(home / "t.gguf").read_bytes()
    files = {"Qwen3-4B-Q4_K_M.gguf": data, "mmproj-F16.gguf": b"eyes"}
    snapshot = put(home / "hub", QWEN, files)
    row = rows(capsys)["qwen3:4b"]
    assert (row["projector"], row["bytes"]) == (str(snapshot / "mmproj-F16.gguf"), len(data) + 4)
    list_models({}, as_json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("qwen3:4b")]
    assert "text, pictures" in line
