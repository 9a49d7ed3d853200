"""The counts for the penalties against lists that are counted again each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgelm.engine.sampling.history import History
from tests.counts import Count

MACHINES = Count(test=60, soak=2_000)
TOKENS = st.integers(0, 30) | st.integers(0, 150_000)


class Machine(RuleBasedStateMachine):
    """Applies the same operations to a history and to plain lists."""

    @initialize(prompt=st.lists(TOKENS, max_size=20), many=st.sampled_from([0, 250, 256, 257, 600]))
    def start(self, prompt: list[int], many: int) -> None:
        self.prompt = prompt + list(range(1000, 1000 + many))
        self.answer: list[int] = []
        self.draft: list[int] = []
        self.history = History(self.prompt)

    @precondition(lambda self: not self.draft)
    @rule(tokens=st.lists(TOKENS, max_size=10))
    def extend(self, tokens: list[int]) -> None:
        self.history.extend(tokens)
        self.answer += tokens

    @precondition(lambda self: not self.draft)
    @rule(start=st.integers(0, 3000), count=st.integers(100, 700))
    def extend_by_many_new(self, start: int, count: int) -> None:
        self.extend(list(range(start, start + count)))

    @rule(token=TOKENS)
    def push(self, token: int) -> None:
        self.history.push(token)
        self.draft.append(token)

    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.draft)))
        self.history.pop(count)
        del self.draft[len(self.draft) - count :]

    @invariant()
    def counts_are_those_of_the_lists(self) -> None:
        if not hasattr(self, "history"):
            return
        ids = self.history.ids.tolist()
        assert len(set(ids)) == len(ids)
        assert set(ids) == {*self.prompt, *self.answer, *self.draft}
        counted = {token: n for token, n in zip(ids, self.history.counts.tolist(), strict=True) if n}
        assert counted == Counter(self.answer + self.draft)


TestHistory = Machine.TestCase
TestHistory.settings = settings(max_examples=MACHINES, stateful_step_count=25)


def test_the_arrays_grow_while_a_token_is_new() -> None:
    history = History(range(256))
    history.extend([256])
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))[256] == 1


def test_pushed_tokens_must_be_popped_first() -> None:
    history = History([1])
    history.push(2)
    with pytest.raises(AssertionError):
        history.extend([3])
    with pytest.raises(AssertionError):
        history.pop(2)
