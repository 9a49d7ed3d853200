"""Kept prefixes: the choice among them, restarts, cache namespaces, and waiting for a common prefix."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from edgelm.base.errors import SnapshotError
from edgelm.engine.core import Copy, Drop, Load, SamplingParams, Save, Sequence, Store
from edgelm.engine.kv_slots import WORTH_WAITING_LEN, Snapshot
from edgelm.engine.prefixes import MIN_PREFIX_LEN, PrefixIndex, common_len
from tests.counts import Count
from tests.engine.fake import FakeFiles
from tests.engine.loop import DiskLoop, Loop, kinds
from tests.engine.simulation import fresh_seed, run_workload

CONVERSATIONS = Count(test=60, soak=2_000)
A, B, C, D = ([token] * 50 for token in (1, 2, 3, 4))
SYSTEM = [7, 8] * 30
Disk = partial(DiskLoop, "slots")


# -- the index ---------------------------------------------------------------------------------------------------------


def test_common_len_equals_a_plain_loop() -> None:
    rng = random.Random()
    for _ in range(Count(test=1_000, soak=50_000)):
        a = rng.choices(range(2), k=rng.randint(0, 40))
        b = a[: rng.randint(0, 40)] + rng.choices(range(2), k=rng.randint(0, 5))
        plain = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_len(np.array(a, np.int32), np.array(b, np.int32)) == plain, (a, b)


def test_matches_are_all_similar_prefixes_most_recently_used_first() -> None:
    rng = random.Random(seed := fresh_seed())
    for _ in range(20):
        index: PrefixIndex[Snapshot] = PrefixIndex()
        kept: list[Snapshot] = []
        heads = [rng.choices(range(5), k=MIN_PREFIX_LEN) for _ in range(3)]
        for key in range(40):
            action = rng.random()
            if kept and action < 0.2:
                index.remove(kept.pop(rng.randrange(len(kept))))
            elif kept and action < 0.4:
                index.touch(kept[at := rng.randrange(len(kept))])
                kept.append(kept.pop(at))
            else:
                tokens = rng.choice(heads) + rng.choices(range(2), k=rng.randint(0, 4))
                kept.append(Snapshot(key, np.array(tokens, np.int32), rng.choice("ab"), 0))
                index.add(kept[-1])
            assert list(index) == kept, f"seed {seed}"
            prompt = np.array(rng.choice(heads) + rng.choices(range(2), k=4), np.int32)
            expected = [
                (prefix, common_len(prefix.tokens, prompt))
                for prefix in reversed(kept)
                if prefix.cache_namespace == "a" and common_len(prefix.tokens, prompt) >= MIN_PREFIX_LEN
            ]
            assert list(index.matches("a", prompt)) == expected, f"seed {seed}"


# -- a prefix of several requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("system_len", [40, 64, 75, 150, 200])
def test_requests_that_arrive_together_compute_their_common_prefix_once(system_len: int) -> None:
    loop = Loop(max_sequences=8, max_tokens=64, capacity=2048)
    system = random.Random(1).choices(range(40), k=system_len)
    requests = [loop.add([*system, number, 5, 6]) for number in range(8)]
    loop.finish()
    assert requests[0].cached == 0
    assert all(system_len - WORTH_WAITING_LEN < seq.cached <= system_len for seq in requests[1:])
    again = sum(system_len - seq.cached for seq in requests[1:])
    answers = sum(seq.completion_len - 1 for seq in requests)
    assert loop.executor.num_computed == system_len + again + 8 * 3 + answers


@pytest.mark.parametrize("max_tokens", [64, 4096])
@pytest.mark.parametrize("system_len", [40, 64, 75, 150, 200])
def test_requests_that_arrive_together_share_the_blocks_of_the_first(system_len: int, max_tokens: int) -> None:
    """Also where all prompts fit in one step."""
    loop = Loop("paged", max_sequences=8, max_tokens=max_tokens, capacity=4096, block_len=16)
    system = random.Random(1).choices(range(40), k=system_len)
    requests = [loop.add([*system, number, 5, 6]) for number in range(8)]
    loop.finish()
    assert [seq.cached for seq in requests] == [0] + [system_len // 16 * 16] * 7


def test_no_request_waits_for_a_short_common_prefix() -> None:
    loop = Loop()
    first, second = loop.add([*[7] * 6, 1]), loop.add([*[7] * 6, 2])
    loop.step()
    assert loop.scheduler.running == [first, second]
    loop.finish()


def test_a_waiting_request_runs_when_the_first_is_cancelled() -> None:
    loop = Loop(max_tokens=16)
    first, second = loop.add([*SYSTEM, 1]), loop.add([*SYSTEM, 2])
    loop.step()
    assert list(loop.scheduler.waiting) == [second]
    loop.scheduler.abort(first.id)
    loop.finish()
    assert second.completion_len == 8
    assert second.cached == 16


def test_no_request_waits_for_a_prefix_of_another_namespace() -> None:
    loop = Loop()
    first, second = loop.add([*SYSTEM, 1]), loop.add([*SYSTEM, 2])
    second.cache_namespace = "other"
    loop.finish()
    third = loop.add([*SYSTEM, 1])
    third.cache_namespace = "other"
    loop.finish()
    assert [seq.cached for seq in (first, second, third)] == [0, 0, len(SYSTEM)]


# -- cache namespaces --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["nothing", "a snapshot", "a restart"])
def test_a_prefix_serves_no_other_namespace(between: str) -> None:
    loop = Disk()
    for cache_namespace, cached in (("ann", 0), ("bob", 0), ("ann", 49), ("bob", 49)):
        seq = loop.add(A)
        seq.cache_namespace = cache_namespace
        loop.finish()
        assert seq.cached == cached, cache_namespace
        if between == "a snapshot":
            loop.ask(B)
        elif between == "a restart":
            loop.restart()


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_conversation_continues_after_a_restart() -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.restart()
    second = loop.ask([*first.tokens, 7, 8])
    assert second.cached == len(first.tokens) - 1
    assert loop.executor.num_computed == 3 + second.completion_len - 1


def test_turns_write_no_file_and_an_idle_flush_writes_each_conversation_once() -> None:
    loop = Disk()
    tokens = A
    for _ in range(3):
        tokens = loop.ask([*tokens, 9]).tokens
    loop.ask(B)
    assert not loop.files.found
    assert Store not in kinds(loop.ops)
    assert kinds(loop.flush_idle()).count(Store) == 2
    assert loop.flush_idle() == []
    assert loop.lengths() == [57, len(tokens) - 1]
    more = loop.ask([*tokens, 9])
    assert Store in kinds(loop.flush_idle())
    assert max(loop.lengths()) == len(more.tokens) - 1


def test_a_file_that_was_not_written_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeFiles, "write", lambda *_: None)
    loop = Disk()
    loop.ask(A)
    assert Store in kinds(loop.flush_idle())
    assert Store not in kinds(loop.flush_idle())


def test_a_snapshot_that_cannot_be_loaded_is_computed_again() -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.ask(B)
    loop.kv._measure()
    loop.memory._refused = frozenset({-1})  # it may hold fewer than the bookkeeper expects
    loop.memory.snapshots.clear()
    again = loop.add([*first.tokens, 7])
    step = loop.scheduler.plan()
    assert step
    with pytest.raises(SnapshotError):
        loop.executor.forward(step)
    loop.scheduler.recompute()
    loop.finish()
    assert again.completion_len == 8


def test_an_idle_flush_leaves_the_conversation_in_its_slot() -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.flush_idle()
    loop.ops.clear()
    assert loop.ask([*first.tokens, 7]).cached == len(first.tokens) - 1
    assert not {Load, Copy} & set(kinds(loop.ops))


def test_an_evicted_snapshot_of_a_conversation_goes_to_a_file() -> None:
    loop = Disk(snapshot_bytes=70 * 10)
    first = loop.ask([*loop.ask(A).tokens, 9])
    loop.ask(B)
    assert not loop.files.found
    loop.ask(C)  # the snapshot of B replaces that of A
    assert kinds(loop.ops)[-4:] == [Store, Drop, Save, type(loop.ops[-1])]
    assert loop.ask([*first.tokens, 7]).cached == len(first.tokens) - 1


def test_others_run_on_while_a_file_is_read() -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.restart()
    loop.memory.read_steps = 3
    running = loop.add(B, max_tokens=20)
    loop.step()
    waiting = loop.add([*first.tokens, 7])
    for _ in range(3):
        loop.step()
        assert loop.scheduler.running == [running]
    loop.step()
    assert loop.scheduler.running == [running, waiting]
    assert waiting.cached == len(first.tokens) - 1
    assert (running.completion_len, loop.files.num_fetched) == (5, 1)
    loop.finish()


@pytest.mark.parametrize("interactive", [False, True])
def test_a_file_is_read_at_once_where_nothing_else_runs_or_for_an_editor(interactive: bool) -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.restart()
    loop.memory.read_steps = 10**9
    if interactive:
        loop.add(B, max_tokens=20)
        loop.step()
    seq = loop.add([*first.tokens, 7], interactive=interactive)
    loop.step()
    assert seq.cached == len(first.tokens) - 1
    loop.finish()


def test_a_request_whose_file_is_read_may_leave() -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.restart()
    loop.memory.read_steps = 10**9
    loop.add(B, max_tokens=20)
    loop.step()
    leaving = loop.add([*first.tokens, 7])
    loop.step()
    behind = loop.add(C)
    loop.step()
    assert behind.cached is None
    loop.scheduler.abort(leaving.id)
    loop.step()
    assert behind.cached == 0
    loop.finish()


def test_a_damaged_file_is_deleted_and_computed_again() -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.restart()
    loop.files.spoiled.update(loop.files.entries)
    assert loop.ask([*first.tokens, 7]).cached == 0
    assert not loop.files.found


def test_the_next_best_file_serves_if_the_best_is_damaged() -> None:
    loop = Disk()
    long, short = loop.ask([*SYSTEM, *A]), loop.ask([*SYSTEM, *B])
    loop.restart()
    best = next(file.name for file in loop.files.found if file.tokens.tolist() == long.tokens[:-1])
    loop.files.spoiled.add(best)
    assert loop.ask([*long.tokens, 7]).cached == len(SYSTEM)
    assert loop.ask([*short.tokens, 7]).cached == len(short.tokens) - 1


def test_a_file_is_not_read_if_there_is_no_room_for_it() -> None:
    loop = Disk(context=200, capacity=220)
    long = loop.ask([*A, *B, *C])
    loop.restart()
    loop.add(D, max_tokens=100)
    loop.step()
    retry = loop.add(long.tokens[:100])
    loop.step()
    assert retry.cached == 0
    assert loop.files.num_fetched == 0
    loop.finish()


def test_a_file_longer_than_the_cache_is_not_read() -> None:
    loop = Disk(context=256)
    long = loop.ask([*A, *B, *C, *D], max_tokens=8)
    loop.restart()
    smaller = Disk(context=128, capacity=128)
    smaller.files = loop.files
    smaller.start()
    assert smaller.ask(long.tokens[:100]).cached == 0


def test_without_files_a_restart_forgets() -> None:
    loop = Loop()
    loop.ask(A)
    assert loop.scheduler.flush_idle(ends=True) is None


def test_a_snapshot_that_was_not_saved_is_not_used() -> None:
    loop = Disk()
    loop.memory._refused = frozenset({1})
    first = loop.ask(A)
    loop.ask(B)
    loop.ask(C)
    assert loop.ask([*first.tokens, 7]).cached == 0


def test_snapshot_sizes_are_measured() -> None:
    """A snapshot here takes four times the expected bytes: after the first, fewer are kept."""
    loop = Disk(snapshot_bytes=5_000)
    loop.memory.nbytes = lambda key: 4 * 10 * len(loop.memory.snapshots[key]) if key in loop.memory.snapshots else None
    loop.ask(A)
    loop.ask(B)
    loop.kv._measure()
    assert [snapshot.nbytes for snapshot in loop.kv._snapshots] == [4 * 10 * 57]
    for start in range(6):
        loop.ask([start] * 50)
    loop.kv._measure()
    assert [snapshot.nbytes for snapshot in loop.kv._snapshots] == [4 * 10 * 57] * 2


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_cells_at_once() -> None:
    loop = Loop(max_tokens=40)
    stays, leaves = loop.add(A, max_tokens=100), loop.add([*B, *C], max_tokens=100)
    for _ in range(3):
        loop.step()
    used = loop.info.capacity - loop.kv._cells.free
    held = loop.kv._cells.length(loop.kv.kv_location(leaves))
    assert held >= 30
    loop.scheduler.abort(leaves.id)
    assert loop.info.capacity - loop.kv._cells.free == used - held
    loop.step()
    assert loop.memory.num_used == loop.kv._cells.length(loop.kv.kv_location(stays))


# -- everything at once ------------------------------------------------------------------------------------------------


def test_random_conversations_answer_as_without_a_cache() -> None:
    """Turns, branches, retries, restarts, damaged files: `Loop` compares each answer with that of the request alone."""
    rng = random.Random(seed := fresh_seed())
    print("seed", seed)
    fetched = 0
    for _ in range(CONVERSATIONS):
        can_trim, keeps_all = rng.random() < 0.7, rng.random() < 0.7
        room = 10 * rng.choice([0, 80, 200, 10_000])
        loop = Disk(snapshot_bytes=room, can_trim=can_trim, keeps_all=keeps_all)
        systems = [rng.choices(range(40), k=rng.randint(1, 60)) for _ in range(2)]
        chats: list[Sequence] = []
        for _ in range(12):
            action = rng.choice(["new", "turn", "turn", "branch", "retry", "idle", "restart", "damage"])
            if action == "new" or not chats:
                prompt = rng.choice(systems) + rng.choices(range(40), k=rng.randint(1, 20))
            elif action == "turn":
                prompt = rng.choice(chats).tokens + rng.choices(range(40), k=rng.randint(1, 10))
            elif action == "branch":
                tokens = rng.choice(chats).tokens
                prompt = tokens[: rng.randint(1, len(tokens))] + rng.choices(range(40), k=3)
            elif action == "retry":
                prompt = list((old := rng.choice(chats)).tokens[: old.prompt_len])
            else:
                if action == "idle":
                    loop.flush_idle()
                elif action == "restart":
                    loop.restart()
                elif loop.files.found:
                    loop.files.spoiled.add(rng.choice(loop.files.found).name)
                continue
            if len(prompt) < loop.info.context - 30:
                chats.append(loop.ask(prompt, max_tokens=rng.randint(1, 20)))
        fetched += loop.files.num_fetched
    assert fetched >= CONVERSATIONS // 5


def test_random_conversations_at_the_same_time_wait_for_their_files() -> None:
    """After each restart several go on at once, beside others; some leave, and some files are damaged."""
    rng = random.Random(seed := fresh_seed())
    print("seed", seed)
    fetched = waited = 0
    for _ in range(CONVERSATIONS):
        can_trim, keeps_all = rng.random() < 0.7, rng.random() < 0.7
        facts = {"can_trim": can_trim, "keeps_all": keeps_all, "capacity": rng.choice([256, 400, 1024])}
        loop = Disk(snapshot_bytes=10 * rng.choice([0, 200, 10_000]), **facts)
        chats = [loop.ask(rng.choices(range(40), k=rng.randint(40, 60)), max_tokens=5) for _ in range(4)]
        for _ in range(3):
            loop.restart()
            loop.memory.read_steps = rng.randint(0, 6)
            if loop.files.found and rng.random() < 0.3:
                loop.files.spoiled.add(rng.choice(loop.files.found).name)
            open_ones = []
            for chat in rng.sample(chats, 4):
                prompt = chat.tokens[: rng.choice([40, len(chat.tokens)])] + rng.choices(range(40), k=3)
                open_ones.append(loop.add(prompt, max_tokens=rng.randint(1, 20), interactive=rng.random() < 0.1))
                for _ in range(rng.randint(0, 4)):
                    loop.step()
                if rng.random() < 0.2:
                    loop.scheduler.abort(rng.choice(open_ones).id)
            loop.finish()
            waited += loop.memory.num_waits
            assert not any(slot.seq for slot in loop.kv._slots)
            chats = [*chats, *(seq for seq in open_ones if seq.completion_len)][-4:]
        fetched += loop.files.num_fetched
    assert fetched >= CONVERSATIONS
    assert waited >= CONVERSATIONS


def test_the_workloads_use_files_and_restarts() -> None:
    runs = [run_workload(seed, "slots") for seed in range(300)]
    assert sum(run.num_restarts for run in runs) >= 50
    assert sum(run.files.num_fetched for run in runs if run.files) >= 10
    assert sum(len(run.files.spoiled) for run in runs if run.files) >= 10


def test_a_sequence_of_another_process_is_not_attached_twice() -> None:
    loop = Disk()
    seq = loop.add(A)
    loop.step()
    stranger = Sequence(99, list(A), len(A), SamplingParams())
    with pytest.raises(AssertionError):
        loop.kv.release(stranger)
    assert seq.kv is not None
