"""SlotKV: which slots, copies and snapshots serve a sequence."""

from __future__ import annotations

import random

import pytest

from edgelm.engine import kv_slots
from edgelm.engine.core import Copy, Drop, Load, Save, Sequence, Trim
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.prefixes import MIN_PREFIX_LEN, common_prefix_len
from tests.counts import Count
from tests.engine.fake import Fault, SlotMemory
from tests.engine.loop import Loop

A, B, C, D = ([token] * 50 for token in (1, 2, 3, 4))
BYTES = 10  # of one token's KV, in the fake


def kinds(loop: Loop) -> list[type]:
    return [type(op) for op in loop.ops]


def memory(loop: Loop) -> SlotMemory:
    assert isinstance(loop.memory, SlotMemory)
    return loop.memory


def kv(loop: Loop) -> SlotKV:
    assert isinstance(loop.kv, SlotKV)
    return loop.kv


def test_common_prefix_len_equals_a_plain_loop() -> None:
    rng = random.Random()
    for _ in range(Count(test=2_000, soak=50_000)):
        a = rng.choices(range(2), k=rng.randint(0, 40))
        b = a[: rng.randint(0, 40)] + rng.choices(range(2), k=rng.randint(0, 5))
        plain = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix_len(a, b) == plain, (a, b)


def test_the_next_turn_continues_the_idle_slot_without_a_snapshot() -> None:
    loop = Loop()
    first = loop.ask(A)
    second = loop.ask([*first.tokens, 7, 8, 9])
    assert second.cached == len(first.tokens) - 1
    assert not {Save, Load, Copy} & set(kinds(loop))


def test_another_conversation_moves_the_idle_slot_into_a_snapshot() -> None:
    loop = Loop()
    first = loop.ask(A)
    loop.ask(B)
    assert kinds(loop) == [Save, Trim]
    again = loop.ask([*first.tokens, 7])
    assert again.cached == len(first.tokens) - 1
    assert Load in kinds(loop)


def test_an_edited_turn_keeps_a_snapshot_of_the_old_one() -> None:
    """Editing an earlier message trims the slot; the long conversation can still be resumed."""
    loop = Loop()
    long = loop.ask([*A, *B])
    edited = loop.ask([*A, *C])
    assert edited.cached == len(A)
    assert loop.ask([*long.tokens, 7]).cached == len(long.tokens) - 1


def test_without_room_for_snapshots_none_is_made() -> None:
    loop = Loop(snapshot_bytes=0)
    loop.ask(A)
    loop.ask(B)
    assert loop.ask(A).cached == 0
    assert kinds(loop) == [Trim, Trim]


def test_a_short_prefix_is_not_worth_a_snapshot() -> None:
    loop = Loop()
    loop.ask([1] * (MIN_PREFIX_LEN - 8), max_tokens=8)
    loop.ask([2] * (MIN_PREFIX_LEN - 7), max_tokens=8)
    assert Save not in kinds(loop)
    loop.ask(C)
    assert Save in kinds(loop)


def test_the_least_recently_used_snapshot_is_evicted_first() -> None:
    loop = Loop(snapshot_bytes=2 * 60 * BYTES)
    loop.ask(A)
    loop.ask(B)
    loop.ask(C)  # A and B are snapshots
    assert loop.ask(A).cached == 49, "it is used now: C replaces B"
    loop.ask(D)
    assert loop.ask(A).cached == 49
    assert loop.ask(B).cached == 0


def test_a_loaded_snapshot_counts_as_used() -> None:
    loop = Loop(snapshot_bytes=3 * 60 * BYTES)
    loop.ask(A)
    loop.ask(B)
    loop.ask(C)
    loop.ask(A)  # snapshots by last use: B, C, A
    loop.ask(D)
    loop.ask([5] * 50)  # the snapshot of D replaces that of B
    assert {tuple(snapshot.tokens[:50]) for snapshot in kv(loop)._snapshots} == {tuple(A), tuple(C), tuple(D)}


def test_a_conversation_keeps_one_snapshot_however_long_it_gets() -> None:
    loop = Loop()
    tokens = A
    for _ in range(5):
        tokens = loop.ask([*tokens, 9]).tokens
        loop.ask(B)
    assert len(kv(loop)._snapshots) == 2
    assert Drop in kinds(loop)


def test_a_fork_shares_the_cells_of_a_running_sequence() -> None:
    loop = Loop()
    loop.add([*A, 1, 2], max_tokens=30)
    loop.step()
    second = loop.add([*A, 2, 1], max_tokens=30)
    loop.step()
    assert kinds(loop) == [Copy]
    assert second.cached == len(A)
    assert memory(loop).num_used == len(A) + 3 + 2
    loop.finish()


def test_a_cache_that_cannot_be_copied_is_not_forked() -> None:
    loop = Loop(can_copy=False)
    loop.add(A, max_tokens=30)
    loop.step()
    assert loop.ask(A).cached == 0


def test_a_cache_that_cannot_be_trimmed_serves_whole_or_not_at_all() -> None:
    loop = Loop(can_trim=False)
    first = loop.ask(A)
    assert loop.ask(A).cached == 0, "its cache is longer than the prompt"
    assert loop.ask([*first.tokens, 5]).cached == len(first.tokens) - 1
    loop.ask(B)
    assert loop.ask([*first.tokens, 5]).cached == len(first.tokens) - 1


def test_a_snapshot_too_long_to_load_beside_others_is_not_loaded() -> None:
    """A retry of the first half of a long conversation fits; the whole of it would not."""
    loop = Loop(context=200, capacity=220)
    loop.ask([*A, *B, *C], max_tokens=8)
    running = loop.add(D, max_tokens=100)
    loop.step()
    retry = loop.add([*A, *B], max_tokens=8)
    loop.step()
    assert retry in loop.scheduler.running
    assert retry.cached == 0
    loop.finish()
    assert running.completion_len == 100


def test_a_sequence_waits_until_there_is_room_for_all_of_it() -> None:
    loop = Loop(context=100, capacity=128)
    first = loop.add([1] * 60, max_tokens=20)
    second = loop.add([2] * 60, max_tokens=20)
    loop.step()
    assert second in loop.scheduler.waiting
    while first in loop.scheduler.running:
        loop.step()
    loop.step()
    assert second in loop.scheduler.running
    loop.finish()


def test_admission_leaves_room_for_running_sequences() -> None:
    loop = Loop(context=100, capacity=128)
    first, second = loop.add([1] * 90), loop.add([2] * 30)
    assert loop.kv.attach(first)
    assert not loop.kv.attach(second), "128 cells are free, but they are promised"
    assert loop.kv.grow(first, 90)
    assert not loop.kv.attach(second), "38 cells are free, 31 are needed, 16 are spare"


def test_the_longest_prefix_wins() -> None:
    system = [5] * 40
    loop = Loop()
    loop.ask([*system, *A])
    second = loop.ask([*system, *B])
    assert loop.ask([*second.tokens, 1]).cached == len(second.tokens) - 1


@pytest.mark.parametrize("where", ["idle", "running"])
@pytest.mark.parametrize("gain", [MIN_PREFIX_LEN - 1, MIN_PREFIX_LEN])
def test_a_snapshot_is_loaded_only_for_a_longer_prefix_than_a_slot_has(where: str, gain: int) -> None:
    """To load one takes the time of some tokens, and an idle conversation would have to leave its slot."""
    system, more = [5] * 40, [6] * gain
    loop = Loop()
    loop.ask([*system, *more, *A])
    other = loop.add([*system, *B], max_tokens=1 if where == "idle" else 30)
    while not other.completion_len:
        loop.step()
    loop.ops.clear()
    seq = loop.add([*system, *more, *C])
    while not seq.completion_len:
        loop.step()
    assert seq.cached == len(system) + (gain if gain >= MIN_PREFIX_LEN else 0)
    assert (Load in kinds(loop)) == (gain >= MIN_PREFIX_LEN)
    loop.finish()


def test_a_failed_step_leaves_no_prefix() -> None:
    loop = Loop()
    loop.ask(A)
    loop.ask(B)
    loop.executor.faults = {loop.executor.num_steps: Fault("chunks", 3)}
    loop.ask(C)
    assert loop.ask(A).cached == 0
    loop.ask(B)
    loop.ask(A)
    assert memory(loop).snapshots.keys() == {snapshot.key for snapshot in kv(loop)._snapshots}


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_snapshot_whose_drop_was_never_done_is_dropped_later(done: int) -> None:
    loop = Loop(snapshot_bytes=60 * BYTES)
    loop.ask(A)
    loop.ask(B)  # A is a snapshot
    loop.executor.faults = {loop.executor.num_steps: Fault("ops", done)}
    loop.ask(C)  # its snapshot should replace that of A
    loop.ask(D)
    assert not memory(loop).snapshots


def test_a_snapshot_whose_drop_was_only_planned_is_dropped_later() -> None:
    loop = Loop(snapshot_bytes=60 * BYTES)
    loop.ask(A)
    loop.ask(B)  # A is a snapshot
    assert loop.kv.attach(loop.add(C))  # its snapshot should replace that of A
    loop.kv.reset()
    for op in loop.kv.take_ops():
        loop.memory.apply(op, lenient=True)
    assert not memory(loop).snapshots


def test_a_reset_unbinds_every_sequence() -> None:
    loop = Loop()
    seq = loop.add(A)
    loop.step()
    loop.kv.reset()
    assert seq.kv is None
    assert seq.computed == 0


def test_a_bound_sequence_cannot_be_attached_again() -> None:
    loop = Loop()
    seq = loop.add(A)
    loop.step()
    with pytest.raises(AssertionError):
        loop.kv.attach(seq)
    stranger = Sequence(99, list(A), len(A), seq.params)
    with pytest.raises(AssertionError):
        loop.kv.grow(stranger, 1)


def test_the_number_of_snapshots_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_slots, "MAX_SNAPSHOTS", 2)
    loop = Loop()
    first = loop.ask(A)
    for other in (B, C, D):
        last = loop.ask(other)
    assert loop.ask([*first.tokens, 7]).cached == 0, "it was the least recently used of three"
    assert loop.ask([*last.tokens, 7]).cached == len(last.tokens) - 1
