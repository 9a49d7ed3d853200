"""Results that stay: found by content, replaced by newer ones, bounded, and never shown from a damaged file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from edgelm.evaluation import kept
from edgelm.evaluation.kept import KeptResults
from tests.evaluation.rows import kept_model


def test_results_are_found_by_the_models_content(tmp_path: Path) -> None:
    KeptResults(tmp_path).keep(kept_model("a" * 64))
    assert KeptResults(tmp_path).of("b" * 64) is None
    assert KeptResults(tmp_path).of("a" * 64) == kept_model("a" * 64)


def test_new_results_come_first_and_replace_those_with_the_same_key(tmp_path: Path) -> None:
    results = KeptResults(tmp_path)
    results.keep(kept_model(key="one", perplexity=1.0))
    results.keep(kept_model(key="two", perplexity=2.0))
    results.keep(kept_model(key="one", perplexity=3.0))
    model = results.of("a" * 64)
    assert model
    assert [(result.key, result.figures["perplexity"]) for result in model.results] == [("one", 3.0), ("two", 2.0)]
    assert [speed.key for speed in model.speeds] == ["one", "two"]
    assert model.result("two")
    assert model.speed("three") is None
    results.keep(replace(kept_model(), results=(), speeds=()))
    assert results.of("a" * 64) == model, "nothing new takes nothing away"


def test_a_speed_is_the_median(tmp_path: Path) -> None:
    (speed,) = kept_model().speeds
    assert (speed.prompt, speed.decode) == (100.0, 10.0)


def test_a_model_of_the_hub_is_found_by_the_hashes_of_its_files(tmp_path: Path) -> None:
    results = KeptResults(tmp_path)
    results.keep(kept_model("a" * 64))
    results.keep(kept_model("b" * 64, blobs=("2" * 64, "1" * 64)))
    found = results.of_blobs(["1" * 64, "2" * 64])
    assert found
    assert found.identity == "b" * 64
    assert results.of_blobs(["1" * 64]) is None
    assert results.of_blobs([]) is None


def test_the_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_MODELS", 2)
    monkeypatch.setattr(kept, "MAX_RESULTS", 3)
    results = KeptResults(tmp_path)
    for number in range(5):
        results.keep(kept_model("a" * 64, key=str(number)))
    model = results.of("a" * 64)
    assert model
    assert [result.key for result in model.results] == ["4", "3", "2"]
    for age, path in enumerate((tmp_path / kept.FOLDER).iterdir()):
        os.utime(path, (age, age))
    for letter in "bc":
        results.keep(kept_model(letter * 64))
    assert results.of("a" * 64) is None
    assert results.of("b" * 64)


def test_a_damaged_file_holds_no_results(tmp_path: Path) -> None:
    results = KeptResults(tmp_path)
    results.keep(kept_model())
    (file,) = (tmp_path / kept.FOLDER).iterdir()
    assert file.stat().st_mode & 0o077 == 0
    whole = file.read_bytes()
    for damaged in (b"", b"[]", b"{}", whole[:-5], whole.replace(b"5.125", b"4.125"), whole.replace(b"results", b"x")):
        file.write_bytes(damaged)
        assert results.of("a" * 64) is None
        assert results.of_blobs(["1"]) is None
    results.keep(kept_model())
    assert results.of("a" * 64)


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    KeptResults(tmp_path / "file").keep(kept_model())
    assert KeptResults(tmp_path / "file").of("a" * 64) is None
