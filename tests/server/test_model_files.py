"""What counts as a change of the files that an engine has mapped, and what a person is told of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from edgelm.server.death import engine_death
from edgelm.server.model_files import ModelFiles


def cut(path: Path) -> None:
    os.truncate(path, 1)


def write_into(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # the clock of some file systems is coarse


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"other")
    new.rename(path)


def nothing(path: Path) -> None:
    path.read_bytes()


CHANGES: list[tuple[Callable[[Path], object], bool, bool]] = [
    (nothing, False, False),
    (cut, True, True),
    (write_into, True, True),
    (replace, False, True),
    (Path.unlink, False, True),
]


@pytest.mark.parametrize(("change", "rewritten", "changed"), CHANGES)
@pytest.mark.parametrize(
    ("names", "opened"),
    [
        (["model.gguf"], "model.gguf"),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "m-00001-of-00002.gguf"),
        (["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"], "m-00002-of-00002.safetensors"),
        (["a.safetensors", "b.safetensors"], "."),
    ],
)
def test_every_file_of_a_model_counts(
    tmp_path: Path, names: list[str], opened: str, change: Callable[[Path], object], rewritten: bool, changed: bool
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"first")
    files = ModelFiles(tmp_path / opened)
    assert not files.rewritten()
    assert not files.changed()
    change(tmp_path / names[-1])
    assert (files.rewritten(), files.changed()) == (rewritten, changed)


def test_what_was_never_there_does_not_change(tmp_path: Path) -> None:
    for name in ("absent.gguf", "m-00001-of-99999.gguf", "a\0b", "x" * 5000):
        assert not ModelFiles(tmp_path / name).changed()


@pytest.mark.parametrize(
    ("code", "change", "says"),
    [
        (-signal.SIGBUS, cut, "model.gguf changed while it was in use; try again; replace a model"),
        (-signal.SIGBUS, Path.unlink, "model.gguf changed while it was in use"),
        (-signal.SIGBUS, nothing, "killed by SIGBUS: a part of model.gguf could not be read; check the disk"),
        (-signal.SIGSEGV, write_into, "model.gguf changed while it was in use"),
        (-signal.SIGSEGV, Path.unlink, "the engine process was killed by SIGSEGV (last words)"),
        (-signal.SIGKILL, nothing, "memory may have run out"),
    ],
)
def test_a_death_by_a_change_says_so(tmp_path: Path, code: int, change: Callable[[Path], object], says: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"first")
    files = ModelFiles(path)
    change(path)
    assert says in str(engine_death(code, ["first words", "last words"], files))
