"""Past answers: a damaged file loses only the damaged records; memory is bounded and serves only its own namespace."""

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

from edgelm.engine.speculation import past_answers as answers
from edgelm.engine.speculation.ngram_counts import NOTHING, look_up
from edgelm.engine.speculation.past_answers import AnswersFile, NamespaceAnswers, PastAnswers, path_for, read_records
from tests.counts import Count

EXAMPLES = Count(test=150, soak=5_000)
THREE = [[1, 2, 3], [40_000], list(range(100, 130))]


def written(path: Path, texts: list[list[int]], cache_namespace: str = "") -> AnswersFile:
    file = AnswersFile(path)
    for text in texts:
        file.append(cache_namespace, text)
    return file


def read(path: Path, cache_namespace: str = "") -> list[list[int]]:
    return [tokens.tolist() for tokens in AnswersFile(path).read(cache_namespace)]


def test_answers_come_back_in_order(tmp_path: Path) -> None:
    written(tmp_path / "folder" / "a", THREE)
    assert read(tmp_path / "folder" / "a") == THREE


def test_each_namespace_reads_only_its_own_answers(tmp_path: Path) -> None:
    file = written(tmp_path / "a", THREE, "alice")
    file.append("", [7, 7])
    assert read(tmp_path / "a", "bob") == []
    assert read(tmp_path / "a") == [[7, 7]]
    assert read(tmp_path / "a", "alice") == THREE
    assert b"alice" not in (tmp_path / "a").read_bytes()


def test_only_the_user_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a"
    written(path, THREE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    written(path, [[1]])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_cut_at_any_byte_keeps_its_whole_records_and_grows(tmp_path: Path) -> None:
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
        who = answers.namespace_id("")
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


def test_a_file_stays_below_its_size_and_keeps_the_newest(tmp_path: Path) -> None:
    file = AnswersFile(tmp_path / "a", max_bytes=4_000)
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
    assert not file.changed()  # by our own answer the file does not change
    assert [(entry.answers, entry.tokens) for entry in answers.info(path.parent)] == [(4, 35)]
    assert answers.clear(path.parent) == 1
    assert file.changed()
    assert answers.info(path.parent) == []
    file.append("", [2])
    assert read(path) == [[2]]


def test_a_new_file_with_the_old_inode_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = written(path, THREE)
    file.read("")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])  # in place, like a file system that reuses inodes
    assert file.changed()


def append_many(path: Path, cache_namespace: str, count: int) -> None:
    file = AnswersFile(path, max_bytes=30_000)
    for number in range(count):
        file.append(cache_namespace, [number] * 40)


def test_processes_that_write_at_the_same_time_lose_no_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=append_many, args=(tmp_path / "a", cache_namespace, 300))
        for cache_namespace in ("a", "b")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    data = (tmp_path / "a").read_bytes()
    records = list(read_records(data))
    length = len(answers._MARK) + answers._HEAD.size + 160
    assert len(data) == len(answers._MAGIC) + length * len(records)  # no torn record, nothing in between
    for cache_namespace in ("a", "b"):
        numbers = [tokens[0] for tokens in read(tmp_path / "a", cache_namespace)]
        assert numbers == sorted(numbers)
    assert max(record.tokens[0] for record in records) == 299


def test_a_file_that_cannot_be_written_or_read_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


# -- in memory ---------------------------------------------------------------------------------------------------------


def settle(memory: PastAnswers, slice_len: int = 32) -> None:
    while memory.work(slice_len):
        pass


def says(memory: PastAnswers, cache_namespace: str, *context: int) -> int | None:
    evidence = look_up(list(context), NOTHING, memory.of(cache_namespace).counts)[1]
    return evidence[0] if evidence else None


def test_an_answer_is_known_once_it_was_counted() -> None:
    memory = PastAnswers()
    memory.add("", [1, 2, 3])
    assert says(memory, "", 1, 2) is None
    settle(memory)
    assert says(memory, "", 1, 2) == 3


def test_one_answer_does_not_run_into_the_next() -> None:
    memory = PastAnswers()
    memory.add("", [1, 2])
    memory.add("", [3, 4])
    settle(memory)
    assert says(memory, "", 2) is None


def test_no_namespace_is_served_the_answers_of_another(tmp_path: Path) -> None:
    for file in (None, AnswersFile(tmp_path / "a")):
        memory = PastAnswers(file)
        memory.add("alice", [1, 2, 3])
        settle(memory)
        assert says(memory, "alice", 1) == 2
        assert says(memory, "bob", 1) is None
        assert says(memory, "", 1) is None
        settle(memory)
        assert says(memory, "bob", 1) is None


def test_answers_outlive_the_process(tmp_path: Path) -> None:
    first = PastAnswers(AnswersFile(tmp_path / "a"))
    first.add("", [1, 2, 3])
    first.add("alice", [4, 5])
    first.close()  # without any work
    again = PastAnswers(AnswersFile(tmp_path / "a"))
    assert says(again, "", 1) is None  # nothing is read before `work`
    settle(again)
    assert says(again, "", 1, 2) == 3
    assert says(again, "", 4) is None


def test_an_answer_added_before_the_file_is_read_is_counted_once(tmp_path: Path) -> None:
    first = PastAnswers(AnswersFile(tmp_path / "a"))
    first.add("", [1, 2])
    first.close()
    again = PastAnswers(AnswersFile(tmp_path / "a"))
    again.add("", [1, 3])
    settle(again)
    assert says(again, "", 1) == 3
    assert again.of("").num_tokens == 4


def test_a_running_engine_forgets_a_cleared_file(tmp_path: Path) -> None:
    folder = answers.folder(tmp_path)
    memory = PastAnswers(AnswersFile(folder / "a.answers"))
    memory.add("", [1, 2, 3])
    settle(memory)
    assert says(memory, "", 1) == 2
    answers.clear(folder)
    assert says(memory, "", 1) is None
    settle(memory)
    assert says(memory, "", 1) is None
    memory.add("", [1, 9])
    settle(memory)
    assert says(memory, "", 1) == 9


@pytest.mark.parametrize("slice_len", [1, 7, 1000])
def test_slices_count_the_same_as_the_whole(slice_len: int) -> None:
    texts = [[(number * step) % 11 for step in range(60)] for number in range(1, 12)]
    memory, whole = PastAnswers(), PastAnswers()
    for text in texts:
        memory.add("", text)
        whole.add("", text)
    settle(memory, slice_len)
    settle(whole, 10**6)
    for text in texts:
        for end in range(len(text)):
            assert says(memory, "", *text[:end]) == says(whole, "", *text[:end])


def test_the_older_half_is_dropped_above_the_limit() -> None:
    kept = NamespaceAnswers(max_tokens=100)
    for number in range(30):
        kept.add(array("i", [1000 + number, 2000 + number] * 5))
        while kept.work(8):
            assert kept.num_tokens <= 100
        known = [look_up([1000 + old], NOTHING, kept.counts)[1] is not None for old in range(number + 1)]
        assert known[-1]
        assert known == sorted(known)  # the newest ones, without a gap
        assert min(number + 1, 5) <= sum(known) <= 10
    kept.add(array("i", range(5_000)))  # longer than the limit
    while kept.work(1000):
        pass
    assert kept.num_tokens <= 100


def test_the_old_counts_serve_until_the_new_ones_are_complete() -> None:
    kept = NamespaceAnswers(max_tokens=100)
    for number in range(10):
        kept.add(array("i", [number + 1, number + 50] * 5))
    while kept.work(1000):
        pass
    kept.add(array("i", [77, 78]))
    assert kept.work(1)
    assert look_up([10], NOTHING, kept.counts)[1] is not None
    while kept.work(1):
        pass
    assert look_up([77], NOTHING, kept.counts)[1] is not None


def test_all_namespaces_together_are_bounded_and_come_back_from_disk(tmp_path: Path) -> None:
    memory = PastAnswers(AnswersFile(tmp_path / "a"), max_tokens=100)
    for number in range(20):
        memory.add(f"namespace {number}", [number + 1, number + 50] * 10)
        settle(memory)
        held = sum(answers.num_tokens for answers in memory._namespaces.values())
        assert held <= 100
    assert says(memory, "namespace 0", 1) is None
    settle(memory)
    assert says(memory, "namespace 0", 1) == 50
