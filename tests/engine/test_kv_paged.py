"""PagedKV: blocks, their sharing, and the order of eviction."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from edgelm.engine.core import NOT_A_TOKEN, Sequence
from edgelm.engine.kv_paged import PagedKV
from tests.engine.fake import Fault, SimpleDrafter, info
from tests.engine.loop import Loop


def kv(loop: Loop) -> PagedKV:
    assert isinstance(loop.kv, PagedKV)
    return loop.kv


def blocks(loop: Loop, seq: Sequence) -> tuple[int, ...]:
    return kv(loop).kv_location(seq)


def test_only_full_blocks_of_a_common_prefix_are_shared() -> None:
    loop = Loop("paged", block_len=4)
    first = loop.add([*range(10), 1, 2, 3], max_tokens=9)
    loop.step()
    second = loop.add([*range(10), 5, 6, 7], max_tokens=9)
    loop.step()
    assert second.cached == 8
    assert blocks(loop, first)[:2] == blocks(loop, second)[:2]
    assert not set(blocks(loop, first)[2:]) & set(blocks(loop, second)[2:])
    assert len(kv(loop)._empty) == 256 - len({*blocks(loop, first), *blocks(loop, second)})
    loop.finish()


def test_equal_blocks_after_different_ones_are_not_shared() -> None:
    """The KV of a block depends on all earlier tokens."""
    loop = Loop("paged", block_len=4)
    loop.ask([1, 1, 1, 1, 5, 6, 7, 8, 9])
    assert loop.ask([2, 2, 2, 2, 5, 6, 7, 8, 9]).cached == 0
    assert loop.ask([5, 6, 7, 8, 9]).cached == 0


def test_one_token_is_always_left_to_compute() -> None:
    loop = Loop("paged", block_len=4)
    loop.ask([*range(8)])
    assert loop.ask([*range(8)]).cached == 4
    assert loop.ask([*range(8), 1]).cached == 8


def test_the_tail_of_an_old_prefix_is_evicted_first() -> None:
    loop = Loop("paged", block_len=4, context=64, capacity=64)
    loop.ask([*range(32)], max_tokens=1)  # 8 full blocks, of 16
    loop.ask([39] * 44, max_tokens=1)  # takes 11: the 8 empty ones and the last 3 of the first prompt
    assert loop.ask([*range(32), 1], max_tokens=1).cached == 4 * 5


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    loop = Loop("paged", block_len=4, context=64, capacity=64)
    loop.ask([1] * 21, max_tokens=1)
    loop.ask([2] * 21, max_tokens=1)
    loop.ask([1] * 21, max_tokens=1)  # used again
    loop.ask([3] * 32, max_tokens=1)  # 6 blocks are empty, 2 of the prompt of 2s are evicted
    assert loop.ask([1] * 21, max_tokens=1).cached == 20  # its last token takes a third
    assert loop.ask([2] * 21, max_tokens=1).cached == 4 * 2


def test_empty_blocks_are_taken_before_those_that_hold_a_prefix() -> None:
    loop = Loop("paged", block_len=4, context=64, capacity=64)
    loop.ask([1] * 21, max_tokens=1)
    loop.ask([2] * 41, max_tokens=1)
    assert loop.ask([1] * 21, max_tokens=1).cached == 20


def test_two_sequences_that_compute_the_same_blocks_keep_one_copy() -> None:
    loop = Loop("paged", block_len=4)
    loop.add([*range(9)], max_tokens=2)
    loop.add([*range(9)], max_tokens=2)
    loop.finish()
    assert len(kv(loop)._reusable) == len(kv(loop)._idle) == 2


def test_a_rejected_draft_gives_its_blocks_back() -> None:
    class Wrong(SimpleDrafter):
        def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
            return [1] * 12

    loop = Loop("paged", block_len=4, drafter=Wrong())
    seq = loop.add([3, 1, 2], max_tokens=30)
    loop.step()
    loop.step()
    assert loop.last
    assert loop.last.chunks[0].rows == 13
    assert len(blocks(loop, seq)) == len(seq.tokens) // 4 + bool(len(seq.tokens) % 4)
    loop.finish()


def test_the_block_table_is_copied_only_after_a_change() -> None:
    loop = Loop("paged", block_len=16)
    seq = loop.add([1] * 3, max_tokens=20)
    loop.step()
    table = blocks(loop, seq)
    loop.step()
    assert blocks(loop, seq) is table
    loop.finish()


def test_a_sequence_that_computed_nan_leaves_no_prefix() -> None:
    loop = Loop("paged", block_len=4, max_tokens=8)
    loop.executor.spoiled = {0: 0}
    loop.add([*range(20)])
    (event,) = loop.finish()
    assert event.error
    assert not any(sample.id == NOT_A_TOKEN for sample in event.sampled)
    assert loop.ask([*range(20)]).cached == 0


def test_a_failed_step_leaves_no_prefix() -> None:
    loop = Loop("paged", block_len=4)
    loop.ask([*range(20)])
    loop.executor.faults = {loop.executor.num_steps: Fault("sample")}
    loop.ask([5])
    assert len(kv(loop)._empty) == 256
    assert loop.ask([*range(20)]).cached == 0


def test_a_reset_unbinds_every_sequence() -> None:
    loop = Loop("paged")
    seq = loop.add([*range(20)])
    loop.step()
    loop.kv.reset()
    assert seq.kv is None
    assert seq.computed == 0


def test_admission_leaves_room_for_running_sequences() -> None:
    """It leaves room for what they are still going to compute, and 16 positions each."""
    loop = Loop("paged", block_len=16, context=96, capacity=128, max_tokens=32)
    first = loop.add([1] * 80, max_tokens=3)  # 5 blocks, 2 of them in the first step
    loop.step()
    second = loop.add([2] * 32, max_tokens=3)  # 3 blocks, 3 are left, 1 is spare
    loop.step()
    assert second in loop.scheduler.waiting
    third = loop.add([3] * 31, max_tokens=3)
    loop.scheduler.abort(second.id)
    loop.step()
    assert loop.scheduler.running == [first, third]
    loop.finish()


def test_blocks_for_the_rest_of_a_prompt_are_promised() -> None:
    loop = Loop("paged", context=96, capacity=128)
    first, second = loop.add([1] * 80), loop.add([2] * 32)
    assert loop.kv.attach(first)
    assert not loop.kv.attach(second), "8 blocks are free, but 5 of them are promised"
    loop.scheduler.abort(second.id)
    assert loop.kv.attach(loop.add([3] * 31))


def test_an_idle_prefix_takes_room_when_it_is_used() -> None:
    loop = Loop("paged", block_len=16, context=96, capacity=128)
    loop.ask([2] * 64, max_tokens=1)
    first = loop.add([1] * 62, max_tokens=1000)  # 4 blocks, and the 4 of [2] * 64 are idle
    loop.step()
    second = loop.add([2] * 65, max_tokens=3)
    loop.step()
    assert second.cached is None, "it is not admitted, because it would be preempted at once"
    assert first in loop.scheduler.running
    loop.finish()


def test_the_cache_must_hold_one_whole_sequence() -> None:
    with pytest.raises(AssertionError):
        PagedKV(info(context=100, capacity=100), block_len=16)
