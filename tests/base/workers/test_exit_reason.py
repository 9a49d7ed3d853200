"""What counts as a change of the files that an engine has mapped, and what a person is told of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from edgelm.base.workers.exit_reason import ModelFiles, exit_reason
from edgelm.base.workers.parent import Exit


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


# What a change is: of the bytes that an engine has mapped, of the model at the path, of either.
CHANGES: list[tuple[Callable[[Path], object], bool, bool, bool]] = [
    (nothing, False, False, False),
    (cut, True, True, True),
    (write_into, True, True, True),
    (replace, False, True, True),
    (Path.unlink, False, False, True),
]


def test_what_macos_writes_beside_a_weight_file_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    files = ModelFiles(tmp_path)
    (tmp_path / "._model.safetensors").write_bytes(b"attributes")
    assert not files.replaced()


@pytest.mark.parametrize(("change", "rewritten", "replaced", "changed"), CHANGES)
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
    tmp_path: Path,
    names: list[str],
    opened: str,
    change: Callable[[Path], object],
    rewritten: bool,
    replaced: bool,
    changed: bool,
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"first")
    files = ModelFiles(tmp_path / opened)
    assert (files.rewritten(), files.replaced(), files.changed()) == (False, False, False)
    change(tmp_path / names[-1])
    assert (files.rewritten(), files.replaced(), files.changed()) == (rewritten, replaced, changed)


def test_a_folder_in_place_of_another_is_another_model(tmp_path: Path) -> None:
    """Its files may have other names: those of the old one are only gone."""
    for folder, name in (("m", "model.safetensors"), ("new", "model-00001-of-00001.safetensors")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"weights")
    files = ModelFiles(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "old")
    assert not files.replaced()
    (tmp_path / "new").rename(tmp_path / "m")
    assert (files.rewritten(), files.replaced()) == (False, True)


def test_what_was_never_there_does_not_change(tmp_path: Path) -> None:
    for name in ("absent.gguf", "m-00001-of-99999.gguf", "a\0b", "x" * 5000):
        assert not ModelFiles(tmp_path / name).changed()
        assert not ModelFiles(tmp_path / name).replaced()


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
    assert says in str(exit_reason(Exit(code, ("first words", "last words")), files))


@pytest.mark.parametrize(("change", "rewritten", "replaced", "changed"), CHANGES)
def test_a_draft_model_counts_too(
    tmp_path: Path, change: Callable[[Path], object], rewritten: bool, replaced: bool, changed: bool
) -> None:
    paths = [tmp_path / "model.gguf", tmp_path / "draft.gguf"]
    for path in paths:
        path.write_bytes(b"a model")
    files = ModelFiles(*paths)
    change(paths[1])
    assert (files.rewritten(), files.replaced(), files.changed()) == (rewritten, replaced, changed)
    assert files.change().message == "model.gguf or draft.gguf changed while it was in use"


def test_an_error_of_ours_that_ends_the_process_is_told_in_its_own_words() -> None:
    lines = (
        "  raise EngineError(",
        "edgelm.base.errors.EngineError: llama.cpp cannot be loaded: no libgomp; install libgomp1",
    )
    assert str(exit_reason(Exit(1, lines), ModelFiles())) == "llama.cpp cannot be loaded: no libgomp; install libgomp1"
