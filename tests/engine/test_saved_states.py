"""Saved states of recurrent layers: what equal prompts and preempted answers compute again."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from edgelm.engine.clock import StepClock
from edgelm.engine.core import Event
from edgelm.engine.kv_paged import BLOCK_LEN
from tests.engine.loop import Loop
from tests.engine.simulation import fresh_seed

STATE_BYTES = 2**20


class Eager(StepClock):
    """Grants prompts all of a step."""

    def prefill_tokens(self, num_decoding: int, depth: int = 0) -> int:
        return 2**20


class Recurrent(Loop):
    """A loop over blocks and states that counts the tokens that each sequence computes."""

    def __init__(self, num_sequences: int, num_saved: int = 4, max_tokens: int = 512) -> None:
        facts: dict[str, Any] = {"context": 1024, "capacity": 8192, "max_tokens": max_tokens, "max_draft": 3}
        facts |= {"max_sequences": num_sequences, "num_states": num_sequences + num_saved, "state_bytes": STATE_BYTES}
        super().__init__("paged", clock=Eager(), **facts)
        self.computed = Counter[int]()  # by sequence

    def step(self) -> list[Event]:
        events = super().step()
        if self.last:
            self.computed.update({chunk.seq.id: len(chunk.tokens) for chunk in self.last.chunks})
        return events


def states_of(loop: Loop) -> dict[str, int]:
    """Return how many states the regions of the cache count, by their kind."""
    found = Counter[str]()
    for region in loop.scheduler.kv_regions():
        found[region.kind] += region.nbytes - region.num_tokens * loop.executor.info.kv_bytes_per_token
    return {kind: nbytes // STATE_BYTES for kind, nbytes in found.items()}


def words(count: int) -> list[int]:
    return random.Random(fresh_seed()).choices(range(40), k=count)


def test_of_equal_prompts_that_come_together_one_is_computed() -> None:
    """Both for `n` answers to one prompt, and for clients with one system prompt and question."""
    loop, prompt = Recurrent(4), words(400)
    together = [loop.add(prompt, max_tokens=8) for _ in range(4)]
    loop.finish()
    assert [seq.cached for seq in together] == [0, 384, 384, 384]
    assert [loop.computed[seq.id] for seq in together] == [400 + 7, 16 + 7, 16 + 7, 16 + 7]


def test_the_regions_of_the_cache_count_states() -> None:
    """One of each running sequence, and those of prefixes with the blocks before them."""
    loop = Recurrent(2)
    for token in (1, 2):
        loop.add([token] * 200, max_tokens=40)
    for _ in range(3):
        loop.step()
    assert states_of(loop) == {"running": 4}, "with those of the prompts"
    loop.finish()
    assert states_of(loop) == {"idle": 4}, "of the prompts and of the answers"


@pytest.mark.parametrize("num_editors", [1, 4])
def test_an_answer_that_makes_way_for_editors_again_and_again_goes_on_from_its_state(num_editors: int) -> None:
    loop = Recurrent(4)
    chats = [loop.add(words(200), client=f"chat {number}", max_tokens=120) for number in range(4)]
    for number in range(100):
        if number % 20 == 10:
            for _ in range(num_editors):
                loop.add(words(100), client="editor", max_tokens=4, interactive=True)
        loop.step()
    assert loop.scheduler.num_preemptions >= 4
    for chat in chats:
        again = loop.computed[chat.id] - (chat.prompt_len + chat.completion_len - 1)
        assert again <= 2 * BLOCK_LEN * loop.scheduler.num_preemptions


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_prompt_makes_way_only_where_its_state_is_saved(num_sequences: int) -> None:
    loop = Recurrent(num_sequences, max_tokens=32)
    agents = [loop.add(words(300), client="agent", max_tokens=4) for _ in range(num_sequences)]
    for _ in range(400):
        loop.add(words(40), client="editor", max_tokens=3, interactive=True)
        loop.step()
        if all(agent.completion_len == 4 for agent in agents):
            break
    assert all(loop.computed[agent.id] <= 300 + 100 for agent in agents)
    assert all(agent.completion_len == 4 for agent in agents), "no agent starves"


def test_an_answer_that_ended_while_it_was_preempted_leaves_its_state_to_others() -> None:
    loop = Recurrent(1, num_saved=1)
    chat = loop.add(words(200), max_tokens=50)
    while chat.completion_len < 40:
        loop.step()
    loop.add(words(100), max_tokens=4, interactive=True)
    loop.step()
    loop.scheduler.abort(chat.id)
    loop.finish()
    loop.last = None
    del chat
    prompt = words(200)
    loop.ask(prompt)
    assert loop.ask(prompt).cached == 176
