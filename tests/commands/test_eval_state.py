"""The file from which an evaluation goes on: whole or not there, and gone when nobody came back."""

from __future__ import annotations

import os
import time
from pathlib import Path

from edgelm.commands.eval_state import KEPT_S, EvalState


def test_a_state_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    key = {"text": "a"}
    saved = {"windows": 3, "bins": {"1": 2}, "mean": 0.1 + 0.2}
    EvalState(tmp_path, key).save(saved)
    assert EvalState(tmp_path, key).load() == saved
    assert EvalState(tmp_path, {"text": "b"}).load() is None
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-9], whole.replace(b'"windows": 3', b'"windows": 4'), b"[]", b'{"key": 1}', b"\xff"):
        file.write_bytes(damaged)
        assert EvalState(tmp_path, key).load() is None
    file.write_bytes(whole)
    EvalState(tmp_path, key).forget()
    assert not list(tmp_path.iterdir())


def test_a_state_that_nobody_came_back_for_is_deleted(tmp_path: Path) -> None:
    EvalState(tmp_path, {"text": "a"}).save({"windows": 3})
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, time.time() - KEPT_S - 60))
    EvalState(tmp_path, {"text": "b"})
    assert not file.exists()


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    state = EvalState(tmp_path / "file" / "eval", {})
    state.save({"windows": 1})
    assert state.load() is None
