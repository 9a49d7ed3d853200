"""Saved states of recurrent layers: what equal prompts and preempted answers compute again."""

from __future__ import annotations

import random
from collections import Counter

from edgelm.engine.clock import StepClock
from edgelm.engine.core import Event
from tests.engine.loop import Loop
from tests.engine.simulation import fresh_seed


class Eager(StepClock):
    """Grants prompts all of a step."""

    def prefill_tokens(self, num_decoding: int, depth: int = 0) -> int:
        return 512


class Recurrent(Loop):
    """A loop over blocks and states that counts the tokens that each sequence computes."""

    def __init__(self, num_sequences: int, num_saved: int = 4) -> None:
        facts = {"context": 1024, "capacity": 8192, "max_tokens": 512, "max_draft": 3}
        facts |= {"max_sequences": num_sequences, "num_states": num_sequences + num_saved}
        super().__init__("paged", clock=Eager(), **facts)
        self.computed = Counter[int]()  # by sequence

    def step(self) -> list[Event]:
        events = super().step()
        if self.last:
            self.computed.update({chunk.seq.id: len(chunk.tokens) for chunk in self.last.chunks})
        return events


def words(count: int) -> list[int]:
    return random.Random(fresh_seed()).choices(range(40), k=count)


def test_of_equal_prompts_that_come_together_one_is_computed() -> None:
    """Both for `n` answers to one prompt, and for clients with one system prompt and question."""
    loop, prompt = Recurrent(4), words(400)
    together = [loop.add(prompt, max_tokens=8) for _ in range(4)]
    loop.finish()
    assert [seq.cached for seq in together] == [0, 384, 384, 384]
    assert [loop.computed[seq.id] for seq in together] == [400 + 7, 16 + 7, 16 + 7, 16 + 7]
