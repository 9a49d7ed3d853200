"""Completions in an editor: how long agents hold them, and what they cost the agents."""

from __future__ import annotations

import random

import pytest

from tests.engine.loop import Loop
from tests.engine.simulation import BOOKKEEPERS, fresh_seed

both = pytest.mark.parametrize("kind", BOOKKEEPERS)
AGENT = 900  # tokens of a prompt, many steps long
BUDGET = 32  # tokens of a step


def loop_of(kind: str, **facts: object) -> Loop:
    return Loop(kind, context=2048, capacity=16_384, max_tokens=BUDGET, snapshot_bytes=10**7, **facts)  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("num_agents", [1, 3, 4, 9])
@pytest.mark.parametrize("slots", [1, 4])
def test_an_unfinished_prompt_delays_an_editor_by_its_own_steps_alone(kind: str, num_agents: int, slots: int) -> None:
    """Alone, 60 tokens take two steps of 32; beside prompts and answers of agents, as many and those for the rest."""
    loop = loop_of(kind, max_sequences=slots)
    rng = random.Random(seed := fresh_seed())
    agents = [loop.add(rng.choices(range(40), k=AGENT), client="agent", max_tokens=20) for _ in range(num_agents)]
    for _ in range(rng.randrange(1, 40)):
        loop.step()
    editor = loop.add(rng.choices(range(40), k=60), client="editor", max_tokens=70, interactive=True)
    steps = 0
    while not editor.completion_len:
        loop.step()
        steps += 1
    assert steps <= 60 // 8 + 2 if loop.scheduler.running != [editor] else steps == 2, f"seed {seed}"
    loop.finish()
    assert [agent.completion_len for agent in agents] == [20] * num_agents


@both
def test_the_prompt_of_an_agent_makes_progress_beside_editors(kind: str) -> None:
    loop = loop_of(kind)
    agent = loop.add([1] * AGENT, client="agent", max_tokens=4)
    loop.step()
    for number in range(AGENT):
        loop.add([number % 40, 2] * 20, client="editor", max_tokens=1, interactive=True)
        done = agent.computed
        loop.step()
        if agent.completion_len:
            return
        assert agent.computed > done, "in every step"
    pytest.fail("the agent starved")


@both
@pytest.mark.parametrize("slots", [1, 2])
def test_editors_that_keep_coming_leave_turns_to_agents(kind: str, slots: int) -> None:
    loop = loop_of(kind, max_sequences=slots)
    agents = [loop.add([number] * 300, client="agent", max_tokens=20) for number in range(3)]
    for number in range(3000):
        loop.add([number % 40, 3] * 20, client="editor", max_tokens=3, interactive=True)
        loop.step()
        if all(agent.completion_len == 20 for agent in agents):
            return
    pytest.fail("an agent starved")


@both
def test_an_answer_that_made_way_goes_on_where_it_was(kind: str) -> None:
    """`Loop.step` compares every answer with that of the request alone."""
    loop = loop_of(kind, max_sequences=1)
    agent = loop.add([1, 2, 3] * 100, client="agent", max_tokens=50)
    while agent.completion_len < 10:
        loop.step()
    editor = loop.add([4, 5] * 20, client="editor", max_tokens=5, interactive=True)
    loop.step()
    assert loop.scheduler.running == [editor]
    assert agent.completion_len == 10
    while editor.completion_len != 5:
        loop.step()
    begin = len(loop.ops)
    loop.step()
    assert loop.last
    assert len(loop.last.chunks[0].tokens) <= 16, "its prefix was kept"
    assert kind == "paged" or len(loop.ops) > begin
    loop.finish()
    assert agent.completion_len == 50


@both
def test_short_answers_do_not_overtake_a_prompt_that_runs(kind: str) -> None:
    loop = loop_of(kind)
    agent = loop.add([1] * 600, client="agent", max_tokens=4)
    loop.step()
    title = loop.add([2] * 600, client="title", max_tokens=8)
    while not agent.completion_len:
        loop.step()
        assert title.computed == 0 or agent.computed >= 599
