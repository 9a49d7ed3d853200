"""The file of past answers: whatever happens to it, what is whole is read, and nobody fails for it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import stat
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgelm.engine import answers
from edgelm.engine.answers import AnswersFile, path_for, read_records
from tests.counts import Count

EXAMPLES = Count(test=150, soak=5_000)
THREE = [[1, 2, 3], [40_000], list(range(100, 130))]


def written(path: Path, texts: list[list[int]], owner: str = "") -> AnswersFile:
    file = AnswersFile(path)
    for text in texts:
        file.append(owner, text)
    return file


def read(path: Path, owner: str = "") -> list[list[int]]:
    return [tokens.tolist() for tokens in AnswersFile(path).read(owner)]


def test_answers_come_back_in_order(tmp_path: Path) -> None:
    written(tmp_path / "folder" / "a", THREE)
    assert read(tmp_path / "folder" / "a") == THREE


def test_each_owner_reads_only_what_is_theirs(tmp_path: Path) -> None:
    file = written(tmp_path / "a", THREE, "alice")
    file.append("", [7, 7])
    assert read(tmp_path / "a", "bob") == []
    assert read(tmp_path / "a") == [[7, 7]]
    assert read(tmp_path / "a", "alice") == THREE
    assert b"alice" not in (tmp_path / "a").read_bytes()


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a"
    written(path, THREE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    written(path, [[1]])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_cut_at_any_byte_the_whole_records_before_are_read_and_new_ones_follow(tmp_path: Path) -> None:
    path = tmp_path / "a"
    ends = []
    for text in THREE:
        written(path, [text])
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        whole = THREE[: sum(end <= length for end in ends)]
        assert read(path) == whole
        written(path, [[5, 6]])
        assert read(path) == [*whole, [5, 6]]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_damage_costs_only_the_records_that_it_hits(data: st.DataObject) -> None:
    raw = bytearray()
    spans = []
    for text in THREE:
        body = array("i", text).tobytes()
        who = answers.owner_id("")
        start = len(raw)
        raw += answers._MARK + answers._HEAD.pack(len(text), answers._checksum(9, who, body), 9, who) + body
        spans.append((start, len(raw)))
    at = data.draw(st.integers(0, len(raw) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=40))
    before = bytes(raw)
    raw[at : at + len(damage)] = damage[: len(raw) - at]
    changed = {index for index in range(len(raw)) if raw[index] != before[index]}
    found = [record.tokens.tolist() for record in read_records(bytes(raw))]
    for text, (start, stop) in zip(THREE, spans, strict=True):
        assert (text in found) == changed.isdisjoint(range(start, stop))
    assert all(text in THREE for text in found)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_noise_is_no_record(noise: bytes, marks: int) -> None:
    assert list(read_records(noise + (answers._MARK + noise) * marks)) == []


def test_it_stays_below_its_size_and_keeps_the_newest(tmp_path: Path) -> None:
    file = AnswersFile(tmp_path / "a", most_bytes=4_000)
    for number in range(200):
        file.append("", [number] * 50)
        assert (tmp_path / "a").stat().st_size <= 4_000 + 250
        assert read(tmp_path / "a")[-1] == [number] * 50
    kept = [tokens[0] for tokens in read(tmp_path / "a")]
    assert kept == list(range(200 - len(kept), 200))
    assert len(kept) >= 4
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_cleared_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.answers"
    file = written(path, THREE)
    file.read("")
    assert not file.changed()
    file.append("", [1])
    assert not file.changed()  # our own answer is no news
    assert [(each.answers, each.tokens) for each in answers.info(path.parent)] == [(4, 35)]
    assert answers.clear(path.parent) == 1
    assert file.changed()
    assert answers.info(path.parent) == []
    file.append("", [2])
    assert read(path) == [[2]]


def test_a_new_file_is_noticed_even_if_it_has_the_number_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = written(path, THREE)
    file.read("")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])  # in place: what a file system that gives numbers again looks like
    assert file.changed()


def append_many(path: Path, owner: str, count: int) -> None:
    file = AnswersFile(path, most_bytes=30_000)
    for number in range(count):
        file.append(owner, [number] * 40)


def test_processes_that_write_at_the_same_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_many, args=(tmp_path / "a", owner, 300)) for owner in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    data = (tmp_path / "a").read_bytes()
    records = list(read_records(data))
    length = len(answers._MARK) + answers._HEAD.size + 160
    assert len(data) == len(answers._MAGIC) + length * len(records)  # nothing torn, nothing between
    for owner in ("a", "b"):
        numbers = [tokens[0] for tokens in read(tmp_path / "a", owner)]
        assert numbers == sorted(numbers)
    assert max(record.tokens[0] for record in records) == 299


def test_a_place_that_cannot_be_written_or_read_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with caplog.at_level(logging.WARNING):
        file = AnswersFile(tmp_path / "file" / "a")
        for _ in range(3):
            file.append("", [1])
        assert AnswersFile(tmp_path / "folder").read("") == []
    assert len(caplog.records) == 2
    assert "answers are not remembered" in caplog.text


def test_a_full_disk_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path / "a", THREE)

    def full(file: int, data: bytes) -> int:
        half = real(file, data[: len(data) // 2])
        assert half
        raise OSError(28, "No space left on device")

    real = os.write
    monkeypatch.setattr(answers.os, "write", full)
    written(tmp_path / "a", [[9] * 20])
    monkeypatch.undo()
    assert "No space left" in caplog.text
    written(tmp_path / "a", [[8]])
    assert read(tmp_path / "a") == [*THREE, [8]]


def test_an_empty_answer_is_not_kept(tmp_path: Path) -> None:
    written(tmp_path / "a", [[]])
    assert not (tmp_path / "a").exists()


def test_another_vocabulary_is_another_file(tmp_path: Path) -> None:
    first = path_for(tmp_path, [b"a", b"bc"])
    assert first == path_for(tmp_path, iter([b"a", b"bc"]))
    assert first.parent == answers.folder(tmp_path)
    assert len({first, path_for(tmp_path, [b"ab", b"c"]), path_for(tmp_path, [b"a", b"bc", b"d"])}) == 3
