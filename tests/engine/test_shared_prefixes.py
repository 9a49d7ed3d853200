"""The prompt that all sessions of an agent begin with outlives other conversations, within a limit for each key."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from edgelm.engine.core import Save, Sequence, Store
from edgelm.engine.kv_paged import BLOCK_LEN, PagedKV
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.prefixes import MIN_PREFIX_LEN
from edgelm.engine.shared_prefixes import MAX_POINTS, SHARED_SHARE, BranchPoints, kept_longest
from tests.engine.loop import Loop
from tests.engine.simulation import fresh_seed

SYSTEM = 300  # tokens
BYTES = 10  # of one token's KV, in the fake


def agent(rng: random.Random) -> list[int]:
    return rng.choices(range(40), k=SYSTEM)


def ask(loop: Loop, prompt: list[int], cache_namespace: str = "") -> Sequence:
    seq = loop.add(prompt, max_tokens=4)
    seq.cache_namespace = cache_namespace
    loop.finish()
    return seq


def sessions(loop: Loop, system: list[int], count: int, cache_namespace: str = "") -> list[int | None]:
    """Start sessions that begin alike; return how much of each prompt was cached."""
    return [ask(loop, [*system, number, *[number + 1] * 60], cache_namespace).cached for number in range(count)]


def shared_lens(loop: Loop) -> list[int]:
    assert isinstance(loop.kv, SlotKV)
    return [len(snapshot.tokens) for snapshot in loop.kv._snapshots if snapshot.shared]


def test_other_conversations_do_not_evict_what_sessions_begin_with() -> None:
    rng = random.Random(seed := fresh_seed())
    loop = Loop(snapshot_bytes=int(400 * BYTES / SHARED_SHARE), context=1024, capacity=4096)
    system = agent(rng)
    assert sessions(loop, system, 4)[1:] == [SYSTEM] * 3
    assert shared_lens(loop) == [SYSTEM]
    for _ in range(20):
        ask(loop, rng.choices(range(40), k=350))
    assert ask(loop, [*system, 30, 31]).cached == SYSTEM, f"seed {seed}"


def test_the_turns_of_one_session_make_no_shared_prefix() -> None:
    """A template may write an earlier answer in another way, so turns leave the session's own snapshots too."""
    rng = random.Random(fresh_seed())
    loop = Loop(context=4096, capacity=8192)
    history = agent(rng)
    for _ in range(12):
        history += rng.choices(range(40), k=2 * MIN_PREFIX_LEN)
        answer = ask(loop, history).tokens[len(history) :]
        history += [(answer[0] + 1) % 40, *answer]
    assert not shared_lens(loop)


def test_a_shared_prefix_is_stored_at_once_and_a_longer_conversation_does_not_replace_it() -> None:
    rng = random.Random(fresh_seed())
    loop = Loop(context=1024, capacity=4096)
    assert isinstance(loop.kv, SlotKV)
    sessions(loop, agent(rng), 6)
    assert sum(isinstance(op, Save) for op in loop.ops) >= 3
    assert not [op for op in loop.ops if isinstance(op, Store)], "there is no disk"
    assert shared_lens(loop) == [SYSTEM]


@pytest.mark.parametrize("used_last", ["own", "other"])
def test_of_shared_prefixes_the_least_recently_used_one_makes_way(used_last: str) -> None:
    """A long conversation has room beside one of them, once all other snapshots are gone."""
    rng = random.Random(seed := fresh_seed())
    loop = Loop(snapshot_bytes=int(320 * BYTES / SHARED_SHARE), context=1024, capacity=4096)
    systems = {key: agent(rng) for key in ("own", "other")}
    for key, system in systems.items():
        sessions(loop, system, 4, key)
    ask(loop, [*systems[used_last], 30, 31], used_last)
    ask(loop, rng.choices(range(40), k=800), "long")
    cached = {key: ask(loop, [*systems[key], 32, 33], key).cached for key in sorted(systems, key=used_last.__ne__)}
    assert cached == {key: SYSTEM if key == used_last else 0 for key in systems}, f"seed {seed}"


def test_one_key_cannot_keep_more_than_its_share() -> None:
    rng = random.Random(seed := fresh_seed())
    loop = Loop(snapshot_bytes=int(320 * BYTES / SHARED_SHARE), context=1024, capacity=4096)
    own = agent(rng)
    sessions(loop, own, 4, "own")
    for _ in range(8):
        sessions(loop, agent(rng), 4, "greedy")
    assert ask(loop, [*own, 30, 31], "own").cached == SYSTEM, f"seed {seed}"


def test_a_shared_prefix_serves_its_own_key_only() -> None:
    rng = random.Random(fresh_seed())
    loop = Loop(context=1024, capacity=4096)
    system = agent(rng)
    sessions(loop, system, 4, "own")
    assert ask(loop, [*system, 30, 31], "other").cached == 0


def test_a_prefix_that_takes_more_than_the_share_is_kept_as_any_other() -> None:
    loop = Loop(snapshot_bytes=int(299 * BYTES / SHARED_SHARE), context=1024, capacity=4096)
    sessions(loop, agent(random.Random(fresh_seed())), 4)
    assert not shared_lens(loop)


# -- blocks ------------------------------------------------------------------------------------------------------------

FULL = SYSTEM - SYSTEM % BLOCK_LEN


def paged(capacity: int = 2048) -> Loop:
    return Loop("paged", context=1024, capacity=capacity)


def test_other_conversations_do_not_evict_the_blocks_that_sessions_begin_with() -> None:
    rng = random.Random(seed := fresh_seed())
    loop = paged()
    system = agent(rng)
    assert sessions(loop, system, 4)[1:] == [FULL] * 3
    for _ in range(20):
        ask(loop, rng.choices(range(40), k=350))
    assert ask(loop, [*system, 30, 31]).cached == FULL, f"seed {seed}"


def test_one_key_cannot_keep_more_than_its_share_of_the_blocks() -> None:
    rng = random.Random(seed := fresh_seed())
    loop = paged()
    own, last = agent(rng), agent(rng)
    sessions(loop, own, 4, "own")
    for _ in range(8):
        sessions(loop, agent(rng), 4, "greedy")
    sessions(loop, last, 4, "greedy")
    for _ in range(20):
        ask(loop, rng.choices(range(40), k=350), "other")
    assert ask(loop, [*own, 30, 31], "own").cached == FULL, f"seed {seed}"
    assert ask(loop, [*last, 30, 31], "greedy").cached == FULL, "the last used one is within the share"


def test_a_prefix_that_takes_more_blocks_than_the_share_is_evicted_as_any_other() -> None:
    rng = random.Random(seed := fresh_seed())
    loop = paged(capacity=1088)  # 68 blocks
    system = agent(rng)
    sessions(loop, system, 4)
    for _ in range(5):
        ask(loop, rng.choices(range(40), k=350))
    assert ask(loop, [*system, 30, 31]).cached == 0, f"seed {seed}"


def test_blocks_of_shared_prefixes_are_taken_only_when_no_others_are_idle() -> None:
    """Random sessions of three keys, several at once: `Loop` compares each answer with that of the request alone."""
    rng = random.Random(seed := fresh_seed())
    kept = 0
    for _ in range(12):
        loop = Loop("paged", context=1024, capacity=rng.choice([1024, 2048]), max_sequences=3)
        kv = loop.kv
        assert isinstance(kv, PagedKV)
        forget = kv._forget

        def checked(block: int, kv: PagedKV = kv, forget: Callable[[int], None] = forget) -> None:
            assert kv._digests[block] not in kv._shared.last or not kv._idle, f"seed {seed}"
            forget(block)

        kv._forget = checked  # type: ignore[method-assign]
        systems = [agent(rng) for _ in range(4)]
        for _ in range(25):
            start = rng.choice(systems)[: rng.choice([SYSTEM, SYSTEM, 280])]
            seq = loop.add([*start, *rng.choices(range(40), k=rng.randint(1, 60))], max_tokens=rng.randint(1, 6))
            seq.cache_namespace = rng.choice(["", "a", "b"])
            for _ in range(rng.choice([0, 1, 100])):
                loop.step()
            by_key = Counter(kv._links[digest].cache_namespace for digest in kv._shared.last if digest in kv._links)
            assert max(by_key.values(), default=0) <= SHARED_SHARE * len(kv._refs), f"seed {seed}"
            assert {kv._digests[block] in kv._shared.last for block in kv._idle} <= {False}
            assert {kv._digests[block] in kv._shared.last for block in kv._idle_last} <= {True}
            assert sorted([*kv._empty, *kv._idle, *kv._idle_last]) == [
                block for block, count in enumerate(kv._refs) if count == 0
            ]
        loop.finish()
        kept += len(kv._shared.last)
    assert kept, "some prefixes were shared"


# -- the rule ----------------------------------------------------------------------------------------------------------


def test_branch_points_are_bounded_and_forgive_a_few_equal_words() -> None:
    rng = np.random.default_rng(seed := fresh_seed() % 2**32)
    points = BranchPoints(256)
    system = rng.integers(0, 1000, 600, np.int32)
    assert not points.is_shared("a", system[:300])
    assert not points.is_shared("b", system[:300]), "of another key"
    assert not points.is_shared("a", system[: 301 + MIN_PREFIX_LEN])
    assert points.is_shared("a", system[: 300 - MIN_PREFIX_LEN]), f"seed {seed}"
    assert not points.is_shared("a", system[:255])
    for _ in range(2 * MAX_POINTS):
        points.is_shared("a", rng.integers(0, 1000, 300, np.int32))
    assert len(points._points) == MAX_POINTS


def test_each_key_keeps_its_last_used_shared_prefixes_within_its_share() -> None:
    rng = random.Random(seed := fresh_seed())
    for _ in range(200):
        limit = rng.randrange(1, 1000)
        shared = [(number, rng.choice("abc"), rng.randrange(1, 200)) for number in range(rng.randrange(12))]
        kept = kept_longest(shared, limit)
        for key in "abc":
            own = [(number, nbytes) for number, owner, nbytes in shared if owner == key]
            lens = [number in kept for number, _ in own]
            assert lens == sorted(lens, reverse=True), f"seed {seed}: the last used ones"
            count = sum(lens)
            assert sum(nbytes for _, nbytes in own[:count]) <= limit, f"seed {seed}"
            assert count == len(own) or sum(nbytes for _, nbytes in own[: count + 1]) > limit
