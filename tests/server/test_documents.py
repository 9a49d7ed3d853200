"""How long the front keeps what was read of a model file."""

from __future__ import annotations

from pathlib import Path

from edgelm.server.documents import MOST_RETRY_S, RETRY_S, Documents, Stamp

STAMP = Stamp(Path("/m.gguf"), 1, 1)
OTHER = Stamp(Path("/n.gguf"), 1, 1)
ERROR, GOOD = {"error": "nothing came within 60 s"}, {"context": 8192}


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_an_error_is_read_again_more_and_more_seldom_and_a_description_never() -> None:
    clock = Clock()
    documents = Documents(clock)
    assert documents.due([STAMP]) == [STAMP]
    pauses_s = [RETRY_S * 2**count for count in range(6)] + [MOST_RETRY_S] * 2
    for pause_s in pauses_s:
        documents.keep(STAMP, ERROR)
        assert documents.get(STAMP) == ERROR
        clock.s += pause_s - 1
        assert not documents.is_due(STAMP), "every list would read a damaged file"
        clock.s += 1
        assert documents.is_due(STAMP)
    documents.keep(STAMP, GOOD)
    clock.s += 10 * MOST_RETRY_S
    assert not documents.is_due(STAMP)
    assert documents.get(STAMP) == GOOD


def test_a_file_that_failed_is_read_after_those_that_are_new() -> None:
    clock = Clock()
    documents = Documents(clock)
    documents.keep(STAMP, ERROR)
    clock.s = RETRY_S
    assert documents.due([STAMP, OTHER]) == [OTHER, STAMP]
