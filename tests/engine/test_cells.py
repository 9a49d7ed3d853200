"""Cells against a model that keeps, for each cell, the set of slots that hold it."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edgelm.engine.cells import Cells
from tests.counts import Count

NUM_SLOTS, CAPACITY = 4, 60


class CellsMachine(RuleBasedStateMachine):
    """Applies the same operations to `Cells` and to lists of cells with sets of holders."""

    @initialize()
    def start(self) -> None:
        self.cells = Cells(NUM_SLOTS, CAPACITY)
        self.slots: list[list[set[int]]] = [[] for _ in range(NUM_SLOTS)]

    @rule(slot=st.integers(0, NUM_SLOTS - 1), count=st.integers(0, 20))
    def extend(self, slot: int, count: int) -> None:
        count = min(count, self.cells.free)
        self.cells.extend(slot, count)
        self.slots[slot] += [{slot} for _ in range(count)]

    @rule(slot=st.integers(0, NUM_SLOTS - 1), share=st.floats(0, 1))
    def trim(self, slot: int, share: float) -> None:
        length = round(share * len(self.slots[slot]))
        self.cells.trim(slot, length)
        for holders in self.slots[slot][length:]:
            holders.remove(slot)
        del self.slots[slot][length:]

    @rule(src=st.integers(0, NUM_SLOTS - 1), dst=st.integers(0, NUM_SLOTS - 1), share=st.floats(0, 1))
    def share(self, src: int, dst: int, share: float) -> None:
        if src == dst:
            return
        self.trim(dst, 0)
        length = round(share * len(self.slots[src]))
        self.cells.share(src, dst, length)
        for holders in self.slots[src][:length]:
            holders.add(dst)
            self.slots[dst].append(holders)

    @invariant()
    def counts_agree(self) -> None:
        assert [self.cells.length(slot) for slot in range(NUM_SLOTS)] == [len(slot) for slot in self.slots]
        used = {id(holders) for slot in self.slots for holders in slot}
        assert self.cells.free == CAPACITY - len(used)


TestCells = CellsMachine.TestCase
TestCells.settings = settings(max_examples=Count(test=100, soak=3_000), stateful_step_count=40, deadline=None)


def test_a_shared_prefix_is_counted_once() -> None:
    cells = Cells(2, 100)
    cells.extend(0, 30)
    cells.share(0, 1, 20)
    cells.extend(1, 5)
    assert cells.free == 100 - 35
    cells.trim(0, 0)
    assert cells.free == 100 - 25


def test_impossible_operations_are_assertion_errors() -> None:
    cells = Cells(2, 10)
    cells.extend(0, 10)
    with pytest.raises(AssertionError):
        cells.extend(1, 1)
    with pytest.raises(AssertionError):
        cells.trim(0, 11)
    with pytest.raises(AssertionError):
        cells.share(1, 0, 0)  # slot 0 is not empty


def test_spans_do_not_pile_up_in_a_slot_that_lives_long() -> None:
    """A slot whose prefix is forked thousands of times stays fast."""
    rng = random.Random()
    cells = Cells(2, 1000)
    cells.extend(0, 500)
    for _ in range(5_000):
        cells.share(0, 1, rng.randint(1, 500))
        cells.trim(1, 0)
    assert len(cells._spans[0]) <= 2
