"""Making way: it changes no answer, starves nobody, and happens only where a sequence can go on later."""

from __future__ import annotations

import pytest

from tests.engine.loop import Loop
from tests.engine.simulation import BOOKKEEPERS
from tests.engine.test_scheduler import Drafts

both = pytest.mark.parametrize("kind", BOOKKEEPERS)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_prompt_is_finished_though_editors_come_and_nothing_is_kept(slots: int) -> None:
    loop = Loop(context=1024, capacity=4096, max_tokens=32, max_sequences=slots, snapshot_bytes=0)
    agents = [loop.add([number] * 300, client="agent", max_tokens=4) for number in range(slots)]
    for number in range(400):
        loop.add([number % 40, 3] * 20, client="editor", max_tokens=3, interactive=True)
        loop.step()
        if all(agent.completion_len == 4 for agent in agents):
            return
    pytest.fail("an agent starved")


@both
def test_a_draft_ends_with_the_turn_that_it_was_made_for(kind: str) -> None:
    """An editor's draft is planned before the prompt of an agent, for which it then makes way."""
    facts = {"context": 400, "capacity": 400, "max_tokens": 64, "max_rows": 64}
    loop = Loop(kind, drafter=Drafts([1] * 40), block_len=4, snapshot_bytes=0, **facts)
    agent = loop.add([2] * 296, max_tokens=80)
    loop.step()
    editor = loop.add([5, 6] * 19, max_tokens=100, interactive=True)
    made_way = False
    while loop.scheduler.num_unfinished:
        loop.step()
        made_way |= editor in loop.scheduler.waiting
        assert not [seq for seq in loop.scheduler.waiting if seq.draft]
    assert made_way
    assert (agent.completion_len, editor.completion_len) == (80, 100)


@both
@pytest.mark.parametrize("same", [True, False])
def test_an_answer_does_not_make_way_for_an_editor_that_waits_for_another_ones_prompt(kind: str, same: bool) -> None:
    """Two completions in one file: the second one is not admitted before the prompt of the first one is computed."""
    loop = Loop(kind, context=1024, capacity=4096, max_tokens=64, max_sequences=2, snapshot_bytes=10**7)
    agent = loop.add([3] * 40, client="agent", max_tokens=200)
    while not agent.completion_len:
        loop.step()
    first = loop.add([1, 2] * 100, client="editor", max_tokens=40, interactive=True)
    loop.step()
    assert first.computed
    second = loop.add([1, 2] * 90 if same else [5] * 90, client="editor", max_tokens=2, interactive=True)
    while not first.completion_len:
        known = agent.completion_len
        loop.step()
        assert agent.completion_len == known + 1
    loop.step()
    assert second in loop.scheduler.running
    assert agent in loop.scheduler.waiting
    loop.finish()
    assert (agent.completion_len, first.completion_len, second.completion_len) == (200, 40, 2)
