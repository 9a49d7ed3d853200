"""BudgetMatcher: ends a model's thinking after a number of tokens, around the grammar of the answer.

Owns the count of a thought's tokens and the text that ends it. Markers come as token ids; knows no model's format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from edgelm.engine.core import Masks, Matcher


@dataclass(frozen=True, slots=True)
class _Thought:
    """The state after some tokens."""

    open: bool
    spent: int = 0  # tokens of thoughts
    closing: int = 0  # tokens of the forced end so far
    partial: bytes = b""  # of a character that is not complete
    tail: bytes = b""  # the end of the text, as long as it may be the start of a marker


class BudgetMatcher:
    """A `Matcher` (core.py) around another one, or around none.

    After `budget` tokens of thought, as soon as the last character is complete, `end_ids` are forced.
    The model may end a thought earlier, with `end_ids` or other tokens of the same text. `start_ids` open one; empty:
    none opens later. With `spans_thought` the inner grammar covers thoughts too: it gets every token, and must allow
    any text in a thought. Without it, the inner grammar begins behind the thought.
    """

    def __init__(
        self,
        inner: Matcher | None,
        budget: int,
        *,
        is_open: bool,
        end_ids: Seq[int],
        start_ids: Seq[int] = (),
        piece: Callable[[int], bytes],
        spans_thought: bool = True,
    ) -> None:
        assert end_ids
        self._inner = inner
        self._budget = budget
        self._piece = piece
        self._start, self._end = (b"".join(map(self._spelled, ids)) for ids in (start_ids, end_ids))
        self._forced_end = [*end_ids]
        self._spans = spans_thought
        self._thought = _Thought(is_open)

    @property
    def thinking(self) -> bool:
        return self._thought.open

    @property
    def done(self) -> bool:
        return self._inner is not None and self._reads(self._thought) and self._inner.done

    @property
    def error(self) -> str | None:
        return self._inner.error if self._inner else None

    @property
    def unrestricted(self) -> bool:
        left = self._budget - self._thought.spent
        return self._inner is None and (left > 1 or not (self._thought.open or self._start))

    def allowed(self, draft: list[int]) -> int:
        allowed = len(draft)
        for row, thought in enumerate(self._states(draft[:-1])):
            forced = self._forced(thought, draft[:row])
            if draft and forced is not None and draft[row] != forced:
                allowed = row
                break
        first = self._first_read(draft)
        if self._inner is None or first >= allowed:
            return allowed
        return first + self._inner.allowed(draft[first:allowed])

    def forced(self, most: int) -> list[int]:
        if self._forced(self._thought, []) is not None:
            return self._forced_end[self._thought.closing :][:most]
        return self._inner.forced(most) if self._inner and self._reads(self._thought) else []

    def fill(self, draft: list[int], rows: Masks) -> None:
        first = self._first_read(draft)
        rows[:first] = -1  # all tokens
        if self._inner is None:
            rows[:] = -1
        elif first < len(rows):
            self._inner.fill(draft[first:], rows[first:])
        for index, (row, thought) in enumerate(zip(rows, self._states(draft), strict=True)):
            token = self._forced(thought, draft[:index])
            if token is not None:
                row[:] = 0
                row.view(np.uint32)[token // 32] = 1 << token % 32

    def accept(self, token: int) -> None:
        if self._inner and self._reads(self._thought):
            self._inner.accept(token)
        self._thought = self._advanced(self._thought, token)

    def _reads(self, thought: _Thought) -> bool:
        """Whether the inner grammar reads the next token."""
        return self._spans or not thought.open

    def _first_read(self, draft: list[int]) -> int:
        """Return how many draft tokens come before those that the inner grammar reads, perhaps all and one more."""
        for row, thought in enumerate(self._states(draft)):
            if self._reads(thought):
                return row
        return len(draft) + 1

    def _states(self, draft: list[int]) -> Iterator[_Thought]:
        """Yield the states before the draft and after each of its tokens."""
        thought = self._thought
        yield thought
        for token in draft:
            thought = self._advanced(thought, token)
            yield thought

    def _forced(self, thought: _Thought, draft: list[int]) -> int | None:
        """Return the token of the forced end that comes next, behind a draft; None: the model may choose."""
        if not self._is_over(thought):
            return None
        token = self._forced_end[thought.closing]
        # A call may end a thought too: then the grammar has no place for another end.
        reads = self._inner is not None and self._spans and not thought.closing
        return None if reads and not self._allows(draft, token) else token

    def _is_over(self, thought: _Thought) -> bool:
        return thought.open and (thought.closing > 0 or (thought.spent >= self._budget and not thought.partial))

    def _allows(self, draft: list[int], token: int) -> bool:
        assert self._inner
        return self._inner.allowed([*draft, token]) > len(draft)

    def _advanced(self, thought: _Thought, token: int) -> _Thought:
        text = thought.tail + self._spelled(token)
        tail = text[-max(len(self._start), len(self._end)) :]
        if not thought.open:
            opened = bool(self._start) and self._start in text
            return replace(thought, open=opened, tail=b"" if opened else tail)
        spent = thought.spent + 1
        ends = self._is_over(thought) and token == self._forced_end[thought.closing]
        closing = thought.closing + 1 if ends else 0
        if closing == len(self._forced_end) or (not closing and self._end in text):
            return _Thought(False, spent)
        return _Thought(True, spent, closing, _incomplete(thought.partial + self._piece(token)), tail)

    def _spelled(self, token: int) -> bytes:
        """Return a token's text, or a name for a control token, which has none."""
        return self._piece(token) or b"\xff%d\xff" % token


def _incomplete(data: bytes) -> bytes:
    """Return the beginning of a UTF-8 character at the end of some bytes."""
    for length in range(1, min(len(data), 3) + 1):
        first = data[-length]
        if first > 0xF4:  # no byte of UTF-8
            break
        if first >= 0xC0:
            whole = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return data[-length:] if length < whole else b""
        if first < 0x80:
            break
    return b""
