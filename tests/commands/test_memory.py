"""`edgelm memory`: it shows the kept answers, and deletes them after a question."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from edgelm.commands.cli import run_cli
from edgelm.engine.speculation import past_answers as answers
from edgelm.engine.speculation.past_answers import AnswersFile


@pytest.fixture
def folder(home: Path) -> Path:
    return answers.folder(home / "data")


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["edgelm", "memory", *words])
    return run_cli()


def fill(folder: Path) -> None:
    for name, texts in (("0123", [[1, 2, 3], [4]]), ("4567", [[5] * 10])):
        file = AnswersFile(folder / f"{name}.answers")
        for text in texts:
            file.append("", text)


def test_an_empty_memory_is_shown_and_cleared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "show") == 0
    assert "no answers are remembered" in capsys.readouterr().out
    assert call(monkeypatch, "clear") == 0
    assert capsys.readouterr().out == "0 answers are deleted\n"
    assert not folder.exists()  # `show` creates nothing


def test_show_counts_the_answers_of_each_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    assert call(monkeypatch, "show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["on"] is True
    assert shown["folder"] == str(folder)
    rows = {row["tokenizer"]: row for row in shown["tokenizers"]}
    assert {name: (row["answers"], row["tokens"]) for name, row in rows.items()} == {"0123": (2, 4), "4567": (1, 10)}
    assert rows["4567"]["bytes"] == (folder / "4567.answers").stat().st_size
    assert rows["4567"]["since"].startswith("20")
    monkeypatch.setenv("EDGELM_MEMORY", "0")
    assert call(monkeypatch, "show") == 0
    out = capsys.readouterr().out
    assert "off" in out
    assert "0123" in out


def test_clear_asks_first(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    assert call(monkeypatch, "clear") == 2
    assert "--yes" in capsys.readouterr().err
    for reply, code in (("n\n", 1), ("", 1), ("y\n", 0)):
        assert len(list(folder.iterdir())) == 2
        terminal = io.StringIO(reply)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        assert call(monkeypatch, "clear") == code
        assert "3 answers" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_clear_does_not_ask_with_yes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(folder)
    (folder / "0123.new").write_bytes(b"left behind by a crash")
    assert call(monkeypatch, "clear", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"answers": 3}
    assert list(folder.iterdir()) == []


def test_an_invalid_folder_is_one_clear_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.answers").mkdir(parents=True)
    assert call(monkeypatch, "show") == 1
    assert "x.answers cannot be read" in capsys.readouterr().err


def test_the_setting_is_a_switch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, shown in (("off", False), ("False", False), ("1", True), ("on", True)):
        monkeypatch.setenv("EDGELM_MEMORY", value)
        assert call(monkeypatch, "show", "--json") == 0
        assert json.loads(capsys.readouterr().out)["on"] is shown
    monkeypatch.setenv("EDGELM_MEMORY", "maybe")
    assert call(monkeypatch, "show") == 2
    assert "EDGELM_MEMORY: memory is 'maybe'" in capsys.readouterr().err
