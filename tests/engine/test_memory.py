"""Memory: what is in RAM is bounded, survives a restart, and serves its owner alone."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from edgelm.engine import answers
from edgelm.engine.answers import AnswersFile
from edgelm.engine.memory import Answers, Memory
from edgelm.engine.ngrams import NOTHING, look_up


def settle(memory: Memory, slice_len: int = 32) -> None:
    while memory.work(slice_len):
        pass


def says(memory: Memory, owner: str, *context: int) -> int | None:
    evidence = look_up(list(context), NOTHING, memory.of(owner).counts)[1]
    return evidence[0] if evidence else None


def test_an_answer_is_known_once_it_was_counted() -> None:
    memory = Memory()
    memory.add("", [1, 2, 3])
    assert says(memory, "", 1, 2) is None
    settle(memory)
    assert says(memory, "", 1, 2) == 3


def test_one_answer_does_not_run_into_the_next() -> None:
    memory = Memory()
    memory.add("", [1, 2])
    memory.add("", [3, 4])
    settle(memory)
    assert says(memory, "", 2) is None


def test_no_owner_is_served_what_another_wrote(tmp_path: Path) -> None:
    for file in (None, AnswersFile(tmp_path / "a")):
        memory = Memory(file)
        memory.add("alice", [1, 2, 3])
        settle(memory)
        assert says(memory, "alice", 1) == 2
        assert says(memory, "bob", 1) is None
        assert says(memory, "", 1) is None
        settle(memory)
        assert says(memory, "bob", 1) is None


def test_it_outlives_the_process(tmp_path: Path) -> None:
    first = Memory(AnswersFile(tmp_path / "a"))
    first.add("", [1, 2, 3])
    first.add("alice", [4, 5])
    first.close()  # without any work
    again = Memory(AnswersFile(tmp_path / "a"))
    assert says(again, "", 1) is None  # nothing is read before there is time
    settle(again)
    assert says(again, "", 1, 2) == 3
    assert says(again, "", 4) is None


def test_what_is_added_before_the_file_is_read_is_counted_once(tmp_path: Path) -> None:
    first = Memory(AnswersFile(tmp_path / "a"))
    first.add("", [1, 2])
    first.close()
    again = Memory(AnswersFile(tmp_path / "a"))
    again.add("", [1, 3])
    settle(again)
    assert says(again, "", 1) == 3
    assert again.of("").num_tokens == 4


def test_a_cleared_memory_is_forgotten_by_an_engine_that_runs(tmp_path: Path) -> None:
    folder = answers.folder(tmp_path)
    memory = Memory(AnswersFile(folder / "a.answers"))
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
    memory, whole = Memory(), Memory()
    for text in texts:
        memory.add("", text)
        whole.add("", text)
    settle(memory, slice_len)
    settle(whole, 10**6)
    for text in texts:
        for end in range(len(text)):
            assert says(memory, "", *text[:end]) == says(whole, "", *text[:end])


def test_the_older_half_goes_when_there_are_too_many() -> None:
    kept = Answers(most_tokens=100)
    for number in range(30):
        kept.add(array("i", [1000 + number, 2000 + number] * 5))
        while kept.work(8):
            assert kept.num_tokens <= 100
        known = [look_up([1000 + each], NOTHING, kept.counts)[1] is not None for each in range(number + 1)]
        assert known[-1]
        assert known == sorted(known)  # the newest ones, without a gap
        assert min(number + 1, 5) <= sum(known) <= 10
    kept.add(array("i", range(5_000)))  # longer than all that may be kept
    while kept.work(1000):
        pass
    assert kept.num_tokens <= 100


def test_while_the_older_half_is_dropped_the_answers_before_still_serve() -> None:
    kept = Answers(most_tokens=100)
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


def test_all_owners_together_are_bounded_and_come_back_from_disk(tmp_path: Path) -> None:
    memory = Memory(AnswersFile(tmp_path / "a"), most_tokens=100)
    for number in range(20):
        memory.add(f"owner {number}", [number + 1, number + 50] * 10)
        settle(memory)
        held = sum(each.num_tokens for each in memory._owners.values())
        assert held <= 100
    assert says(memory, "owner 0", 1) is None
    settle(memory)
    assert says(memory, "owner 0", 1) == 50
