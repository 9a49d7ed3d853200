"""Files are replaced in one step: a failure leaves the old file and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.atomic import atomic_json, atomic_write, read_json


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_and_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    atomic_write(path, b"one")
    path.chmod(0o644)
    atomic_write(path, b"t", memoryview(b"wo"))
    assert path.read_bytes() == b"two"
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert list(path.parent.iterdir()) == [path]


def test_a_shared_file_follows_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        atomic_write(tmp_path / "file", b"", mode=0o666)
    finally:
        os.umask(umask)
    assert mode(tmp_path / "file") == 0o640


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(type(error)):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_another_process_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "file"
    num_removed = 0

    def open_late(*arguments: Any) -> int:
        nonlocal num_removed
        if num_removed < 5:
            num_removed += 1
            path.parent.rmdir()
        return real(*arguments)

    real = os.open
    monkeypatch.setattr(os, "open", open_late)
    atomic_write(path, b"x")
    assert path.read_bytes() == b"x"
    assert num_removed == 5


def test_json_comes_back(tmp_path: Path) -> None:
    atomic_json(tmp_path / "file", {"a": [1, 2.5, "é"]})
    assert read_json(tmp_path / "file", 100) == {"a": [1, 2.5, "é"]}


def test_json_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    atomic_json(tmp_path / "file" / "below", {})
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'"' + b"x" * 200 + b'"'])
def test_a_file_that_is_not_ours_is_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_json(tmp_path / "file", 100 if content.startswith(b'"') else 1_000_000) is None


def test_what_is_no_file_is_no_json(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait forever
    for name in ("pipe", "nothing", "."):
        assert read_json(tmp_path / name, 100) is None
