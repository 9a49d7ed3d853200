"""What is written before the engine ends: conversations that went on and grew, not too much within an hour."""

from __future__ import annotations

import random

import pytest

from edgelm.engine import idle_writes
from edgelm.engine.core import Sequence, Store
from edgelm.engine.idle_writes import IdleWrites
from edgelm.engine.prefixes import Tokens
from tests.engine.loop import DiskLoop

BOTH = pytest.mark.parametrize("kind", ["slots", "paged"])
ROOM = {"context": 2048, "capacity": 8192, "snapshot_bytes": 10**6}
HYBRID = {**ROOM, "can_trim": False, "keeps_all": False}


def words(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(40), k=length)


def pause(loop: DiskLoop) -> list[Tokens]:
    """Return the prefixes that a pause writes."""
    return [op.tokens for op in loop.flush_idle(ends=False) if isinstance(op, Store)]


def chat(loop: DiskLoop, turns: int, added: int, length: int = 800) -> tuple[int, Sequence]:
    """Talk with a pause after each turn; return how many tokens the pauses wrote, and the last turn."""
    tokens, num_written = words(length), 0
    for turn in range(turns):
        seq = loop.ask(tokens)
        num_written += sum(len(stored) for stored in pause(loop))
        tokens = seq.tokens + words(added, turn)
    return num_written, seq


@BOTH
def test_prompts_that_never_go_on_are_written_at_the_end_alone(kind: str) -> None:
    loop = DiskLoop(kind, **ROOM)
    system = words(100)
    for number in range(8):
        loop.ask([*system, *words(200, number)])
        assert all(len(stored) < 200 for stored in pause(loop)), "what they share is written once"
    loop.restart()
    assert sum(length >= 200 for length in loop.lengths()) == 8


@BOTH
def test_a_conversation_is_written_again_when_it_has_grown_by_a_quarter(kind: str) -> None:
    num_written, seq = chat(DiskLoop(kind, **ROOM), turns=10, added=22)
    assert 800 < num_written < 2.2 * len(seq.tokens), "in its second turn, and once more"


@BOTH
def test_a_file_that_waits_for_the_disk_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = DiskLoop(kind, **ROOM)
    monkeypatch.setattr(type(loop.files), "write", lambda *_: None)
    num_written, seq = chat(loop, turns=10, added=22)
    assert 800 < num_written < 2.2 * len(seq.tokens)


@BOTH
def test_a_crash_costs_at_most_the_last_fifth_of_a_conversation(kind: str) -> None:
    loop = DiskLoop(kind, **ROOM)
    _, last = chat(loop, turns=8, added=60)
    loop.start()
    again = loop.ask([*last.tokens, 5])
    assert again.cached is not None
    assert again.cached >= 0.8 * len(last.tokens) - 16


@BOTH
def test_the_end_writes_what_no_pause_did(kind: str) -> None:
    loop = DiskLoop(kind, **ROOM)
    _, last = chat(loop, turns=4, added=10)
    loop.restart()
    assert loop.ask([*last.tokens, 5]).cached in (len(last.tokens) - 1, (len(last.tokens) - 1) // 16 * 16)


@BOTH
def test_a_template_that_omits_thoughts_continues_a_conversation(kind: str) -> None:
    loop = DiskLoop(kind, **ROOM)
    question = words(400)
    loop.ask([*question, 1, 2, 3], max_tokens=60)
    assert pause(loop) == []
    second = loop.ask([*question, 4, *words(40, 1)])
    block_len = 1 if kind == "slots" else 16
    assert [len(stored) for stored in pause(loop)] == [(len(second.tokens) - 1) // block_len * block_len]


@BOTH
def test_a_sequence_that_makes_way_and_comes_back_is_one_request(kind: str) -> None:
    loop = DiskLoop(kind, context=256, capacity=256, snapshot_bytes=10**6)
    first, second = loop.add(words(90, 1), max_tokens=100), loop.add(words(90, 2), max_tokens=100)
    loop.finish()
    assert loop.scheduler.num_preemptions
    assert first.completion_len == second.completion_len == 100
    assert pause(loop) == []


def test_what_leaves_the_memory_is_written_if_its_conversation_went_on() -> None:
    loop = DiskLoop("slots", snapshot_bytes=10 * 150)
    first = loop.ask(words(60, 1))
    first = loop.ask([*first.tokens, 5])
    for number in range(2, 6):
        loop.ask(words(80, number))
    stored = [op.tokens.tolist() for op in loop.ops if isinstance(op, Store)]
    assert stored == [first.tokens[:-1]]
    assert loop.ask([*first.tokens, 7]).cached == len(first.tokens) - 1


def test_the_end_of_a_prompt_of_a_cache_that_cannot_be_cut_is_written_once_it_served() -> None:
    loop = DiskLoop("slots", **HYBRID)
    question = words(400)
    loop.ask([*question, *[1] * 8])
    assert pause(loop) == []
    loop.ask([*question, *[1] * 8], seed=2)
    loop.ask(words(300, 9))
    assert len(question) - 8 in {len(stored) for stored in pause(loop)}


@BOTH
def test_the_bytes_of_an_hour_are_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = DiskLoop(kind, **ROOM)
    now = 0.0
    monkeypatch.setattr(idle_writes, "MAX_HOURLY_BYTES", 10 * 1000)  # 10 bytes a token
    monkeypatch.setattr(loop.kv, "_writes", IdleWrites(divisible=True, clock=lambda: now))
    for number in range(4):
        seq = loop.ask(words(600, number))
        loop.ask([*seq.tokens, 5])
        assert len(pause(loop)) == (number == 0)
    now = 3600.0
    assert len(pause(loop)) == 1, "the rest waits for its hour, or for the end"
    loop.restart()
    assert sum(length >= 600 for length in loop.lengths()) == 4
