"""PagedKV with files: idle prefixes are stored, and found again by the next process."""

from __future__ import annotations

import random
from functools import partial

import pytest

from edgelm.base.errors import SnapshotError
from edgelm.engine.core import Drop, Load, Save, Sequence, Store
from edgelm.engine.kv_paged import PagedKV
from tests.counts import Count
from tests.engine.fake import Fault, PagedMemory
from tests.engine.loop import DiskLoop, Loop, kinds
from tests.engine.simulation import fresh_seed

CONVERSATIONS = Count(test=60, soak=2_000)
A, B = ([token] * 50 for token in (1, 2))
SYSTEM = [7, 8] * 30
Disk = partial(DiskLoop, "paged")


def test_a_conversation_continues_after_a_restart() -> None:
    loop = Disk()
    first = loop.ask(A)  # 57 positions
    loop.restart()
    second = loop.ask([*first.tokens, 7, 8])
    assert second.cached == 48
    assert loop.executor.num_computed == len(first.tokens) + 2 - 48 + second.completion_len - 1
    assert loop.ask([*first.tokens, 9]).cached == 48, "it is in the cache now"
    assert loop.files.num_fetched == 1


def test_an_idle_flush_writes_each_conversation_once() -> None:
    loop = Disk()
    tokens = A
    for _ in range(3):
        tokens = loop.ask([*tokens, 9]).tokens
    loop.ask(B)
    assert not loop.ops
    assert kinds(loop.flush_idle()) == [Save, Store, Drop] * 2
    assert loop.flush_idle() == []
    assert loop.lengths() == [48, (len(tokens) - 1) // 16 * 16]
    more = loop.ask([*tokens, *SYSTEM])
    assert kinds(loop.flush_idle()) == [Save, Store, Drop]
    assert max(loop.lengths()) == (len(more.tokens) - 1) // 16 * 16


def test_the_last_used_conversation_is_written_first() -> None:
    loop = Disk()
    loop.ask(A)
    loop.ask(B)
    loop.ask(A)
    stored = [op.tokens[0] for op in loop.flush_idle() if isinstance(op, Store)]
    assert stored == [1, 2]


def test_branches_are_files_of_their_own() -> None:
    loop = Disk()
    first, second = loop.ask([*SYSTEM, *A]), loop.ask([*SYSTEM, *B])
    loop.restart()
    assert loop.lengths() == [112, 112]
    assert loop.ask([*first.tokens, 5]).cached == 112
    before = loop.files.num_fetched
    assert loop.ask([*second.tokens, 5]).cached == 112
    loads = [op for op in loop.ops if isinstance(op, Load)]
    assert [(len(op.kv), op.first) for op in loads if isinstance(op.kv, tuple)] == [(7, 0), (4, 3)]
    assert loop.files.num_fetched == before + 1


def test_a_short_prefix_is_no_file_and_a_short_match_is_not_loaded() -> None:
    loop = Disk()
    loop.ask([5] * 20, max_tokens=1)
    loop.ask(A)
    loop.restart()
    assert loop.lengths() == [48]
    assert loop.ask([1] * 30, max_tokens=1).cached == 0  # one block
    loop.start()
    assert loop.ask([1] * 40, max_tokens=1).cached == 32
    assert loop.ask([1] * 60).cached == 32, "one more block is not worth reading a file"


def test_one_token_is_always_left_to_compute() -> None:
    loop = Disk()
    loop.ask(A)
    loop.restart()
    assert loop.ask([1] * 48).cached == 32
    loop.start()
    assert loop.ask([1] * 49).cached == 48


def test_a_prefix_whose_head_was_evicted_is_no_file() -> None:
    loop = Disk(context=128, capacity=128)
    loop.ask(A, max_tokens=1)
    assert isinstance(loop.kv, PagedKV)
    digest = next(digest for digest, link in loop.kv._links.items() if not link.previous)
    head = loop.kv._reusable[digest]
    del loop.kv._idle[head]
    loop.kv._forget(head)
    assert loop.flush_idle() == []


def test_a_prefix_serves_no_other_namespace() -> None:
    loop = Disk()
    for namespace, cached in (("a", 0), ("b", 0), ("a", 48), ("b", 48)):
        loop.restart()
        seq = loop.add(A)
        seq.cache_namespace = namespace
        loop.finish()
        assert seq.cached == cached, namespace


def test_a_damaged_file_is_deleted_and_the_next_best_serves() -> None:
    loop = Disk()
    long = loop.ask([*SYSTEM, *A])
    loop.ask([*SYSTEM, *B])
    loop.restart()
    best = next(file.name for file in loop.files.found if file.tokens[-1] != 2)
    loop.files.spoiled.add(best)
    assert loop.ask([*long.tokens, 7]).cached in (len(SYSTEM) // 16 * 16, 112)
    loop.restart()
    loop.files.spoiled.update(loop.files.entries)
    assert loop.ask([*long.tokens, 7]).cached == 0
    assert not loop.files.found


def test_a_state_that_cannot_be_loaded_is_computed_again() -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.restart()
    seq = loop.add([*first.tokens, 7])
    step = loop.scheduler.plan()
    assert step
    assert seq.cached == 48
    assert isinstance(loop.memory, PagedMemory)
    loop.memory.snapshots.clear()
    with pytest.raises(SnapshotError):
        loop.executor.forward(step)
    loop.scheduler.recompute()
    loop.executor.lenient = True
    loop.files.spoiled.update(loop.files.entries)
    loop.finish()
    assert seq.completion_len == 8


@pytest.mark.parametrize("done", [0, 1])
def test_a_step_that_fails_leaves_no_snapshot_and_no_wrong_block(done: int) -> None:
    loop = Disk()
    first = loop.ask(A)
    loop.restart()
    loop.executor.faults = {0: Fault("ops", done)}
    loop.ask([*first.tokens, 7])
    loop.executor.lenient = True
    assert loop.ask([*first.tokens, 7]).completion_len == 8
    assert isinstance(loop.memory, PagedMemory)
    assert not loop.memory.snapshots


def test_a_prompt_is_loaded_beside_running_sequences() -> None:
    loop = Disk(context=128, capacity=256)
    first = loop.ask(A)
    loop.restart()
    loop.add(B, max_tokens=40)
    loop.step()
    second = loop.add([*first.tokens, 3], max_tokens=20)
    third = loop.add([*first.tokens, 4], max_tokens=20)
    loop.finish()
    assert (second.cached, third.cached) == (48, 48)
    assert loop.files.num_fetched == 1


def test_without_files_nothing_is_kept_for_a_later_process() -> None:
    loop = Loop("paged")
    loop.ask(A)
    assert loop.scheduler.flush_idle(ends=True) is None
    assert isinstance(loop.kv, PagedKV)
    assert not any(link.tokens for link in loop.kv._links.values())


def test_what_sessions_begin_with_is_a_file_of_its_own_written_after_the_last_conversation() -> None:
    loop = Disk(context=256, capacity=1024)
    loop.ask(B)
    for token in range(20, 24):
        loop.ask([*SYSTEM, *[token] * 40])
    stored = [op for op in loop.flush_idle() if isinstance(op, Store)]
    assert [op.shared for op in stored] == [False, True, *[False] * 4]
    assert (stored[0].tokens[-1], stored[1].tokens.tolist()) == (23, SYSTEM[:48])
    assert stored[-1].tokens[0] == 2, "the oldest conversation is the last"
    assert loop.flush_idle() == []


def test_sessions_that_leave_a_file_of_the_last_process_show_a_shared_prefix() -> None:
    loop = Disk(context=256, capacity=1024)
    loop.ask([*SYSTEM, *A])
    loop.restart()
    for token in range(20, 22):
        loop.ask([*SYSTEM, *[token] * 40])
    assert [op.shared for op in loop.flush_idle() if isinstance(op, Store)] == [False, True, False]


RECURRENT = {"context": 1024, "capacity": 4096, "max_sequences": 2, "num_states": 8, "max_draft": 3}


def test_a_conversation_with_states_continues_after_a_restart() -> None:
    loop = Disk(**RECURRENT)
    first = loop.ask([1] * 300)
    end = (len(first.tokens) - 1) // 16 * 16
    saves = [op for op in loop.flush_idle() if isinstance(op, Save)]
    assert [len(op.kv) * 16 for op in saves if isinstance(op.kv, tuple)] == [end, 272], "also where a retry goes on"
    assert loop.flush_idle() == []
    loop.start()
    assert loop.ask([*first.tokens, 7, 8]).cached == end
    assert loop.ask([*first.tokens, 9]).cached == end, "it is in the cache now"
    assert loop.files.num_fetched == 1
    loop.start()
    retry = loop.ask([*[1] * 284, 5, 5, 5])
    assert retry.cached == 272, "a shorter file, since a state is that behind all of its tokens"
    loop.start()
    assert loop.ask([1] * 260).cached == 0


def test_states_of_a_common_beginning_are_written_once() -> None:
    loop = Disk(**RECURRENT | {"context": 4096, "capacity": 16384, "num_states": 12})
    for token in range(10, 14):
        loop.ask([*[7, 8] * 400, *[token] * 300])
    stored = [(tuple(op.tokens), op.shared) for op in loop.flush_idle() if isinstance(op, Store)]
    assert [(len(tokens), shared) for tokens, shared in stored[:3]] == [(1104, False), (800, True), (1072, False)]
    assert len({tokens for tokens, _ in stored}) == len(stored) == 9
    assert loop.flush_idle() == []


def test_a_damaged_file_of_a_state_is_computed_again() -> None:
    loop = Disk(**RECURRENT)
    first = loop.ask([1] * 300)
    loop.restart()
    loop.files.spoiled.add(max(loop.files.found, key=lambda file: len(file.tokens)).name)
    assert loop.ask([*first.tokens, 7]).cached == 272
    loop.start()
    loop.files.spoiled.update(loop.files.entries)
    assert loop.ask([*first.tokens, 7]).cached == 0


def random_prompt(rng: random.Random, action: str, systems: list[list[int]], chats: list[Sequence]) -> list[int]:
    if action == "new" or not chats:
        return rng.choice(systems) + rng.choices(range(40), k=rng.randint(1, 20))
    tokens = rng.choice(chats).tokens
    if action == "turn":
        return tokens + rng.choices(range(40), k=rng.randint(1, 10))
    return tokens[: rng.randint(1, len(tokens))] + rng.choices(range(40), k=rng.choice([0, 3]))  # a branch, or a retry


def disturb(rng: random.Random, action: str, loop: Disk) -> None:
    loop.finish()
    if action == "idle":
        loop.flush_idle()
    elif action == "restart":
        loop.restart()
    elif loop.files.found:
        loop.files.spoiled.add(rng.choice(loop.files.found).name)


@pytest.mark.parametrize("recurrent", [False, True])
def test_random_conversations_answer_as_without_a_cache(recurrent: bool) -> None:
    """Turns, branches, parallel requests, restarts, damage: `Loop` compares each answer with that of one alone."""
    rng = random.Random(seed := fresh_seed())
    print("seed", seed)
    fetched = 0
    for _ in range(CONVERSATIONS):
        capacity = rng.choice([256, 320, 1024])
        sequences = rng.choice([1, 2, 4])
        facts = {"num_states": sequences + rng.choice([1, 4]), "max_draft": 3} if recurrent else {}
        loop = Disk(block_len=rng.choice([4, 16, 32]), capacity=capacity, max_sequences=sequences, **facts)
        systems = [rng.choices(range(40), k=rng.randint(1, 60)) for _ in range(2)]
        chats: list[Sequence] = []
        for _ in range(14):
            action = rng.choice(["new", "turn", "turn", "branch", "idle", "restart", "restart", "damage"])
            if chats and action in ("idle", "restart", "damage"):
                disturb(rng, action, loop)
                continue
            prompt = random_prompt(rng, action, systems, chats)
            if len(prompt) >= loop.info.context - 30:
                continue
            chats.append(loop.add(prompt, max_tokens=rng.randint(1, 20)))
            chats[-1].cache_namespace = rng.choice(["", "", "other"])
            for _ in range(rng.choice([0, 1, 3, 100])):
                loop.step()
        loop.finish()
        fetched += loop.files.num_fetched
    assert fetched >= CONVERSATIONS // (8 if recurrent else 2)
