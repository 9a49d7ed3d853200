"""SlotKV: who holds which of llama.cpp's sequence ids, and which prefixes of the past can be used again.

Owns integers: the tokens behind each slot and each snapshot, and the order in which they were last used. What is to
be done on the device leaves as ops of the next step. Knows nothing of llama.cpp's functions.

    slots      running │ running │ idle: only the last one, and only while nothing else runs │ empty …
    snapshots  copies of idle slots in RAM, least recently used first out

Cells of an idle sequence make the steps of every other one slower (8,192 of them: 3.5 times), so idle prefixes leave
the cache for a snapshot as soon as another sequence runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from edgelm.core import Copy, Drop, ExecutorInfo, Load, Op, Save, Sequence, Trim
from edgelm.engine.cells import Cells

MAX_SNAPSHOTS = 256  # each is compared with every new prompt
MIN_SNAPSHOT_LEN = 32  # shorter prefixes are computed again faster than they are kept
SPARE_LEN = 16  # positions left to each running sequence when another one is admitted


@dataclass(eq=False, slots=True)
class Slot:
    """One of llama.cpp's sequence ids."""

    id: int
    owner: Sequence | None = None
    idle_tokens: list[int] = field(default_factory=list)  # what it holds while nobody owns it

    @property
    def tokens(self) -> list[int]:
        """The tokens whose KV is final; the owner's list may be longer than `length`."""
        return self.owner.tokens if self.owner else self.idle_tokens

    @property
    def length(self) -> int:
        return self.owner.computed if self.owner else len(self.idle_tokens)


@dataclass(eq=False, slots=True)
class Snapshot:
    """A copy of a slot in RAM."""

    key: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Match:
    """`length` positions of `source` are what a sequence begins with."""

    length: int
    source: Slot | Snapshot | None = None


def common_prefix_len(a: list[int], b: list[int]) -> int:
    """Return how many leading tokens are equal, by slices: comparing lists is fast, looping over them is not."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class SlotKV:
    """The `KVCache` of the llama executor. `snapshot_bytes` bounds the snapshots in RAM."""

    def __init__(self, info: ExecutorInfo, snapshot_bytes: int) -> None:
        self._info = info
        self._cells = Cells(info.max_sequences, info.capacity)
        self._slots = [Slot(i) for i in range(info.max_sequences)]
        self._snapshots: list[Snapshot] = []  # least recently used first
        self._keys = itertools.count()
        self._ops: list[Op] = []
        self._taken: tuple[Op, ...] = ()  # by the last step, which may have failed in the middle
        self._max_snapshot_tokens = snapshot_bytes // max(info.kv_bytes_per_token, 1)

    # -- KVCache ---------------------------------------------------------------------------------------------------

    def attach(self, seq: Sequence) -> bool:
        assert seq.kv is None
        assert seq.computed == 0
        if all(slot.owner for slot in self._slots):
            return False
        match = self._best_match(seq.tokens)
        idle = self._idle()
        if idle and idle is not match.source:
            if isinstance(match.source, Snapshot):
                self._touch(match.source)
            self._evict(idle)
            match = self._best_match(seq.tokens)  # the eviction made a snapshot, and may have dropped another
        if not self._has_room(seq, match):
            match = _Match(0)
            if not self._has_room(seq, match):
                return False
        slot = self._take_slot(match)
        slot.owner, slot.idle_tokens = seq, []
        seq.kv, seq.computed = slot, match.length
        return True

    def grow(self, seq: Sequence, length: int) -> bool:
        slot = self._slot_of(seq)  # a sequence runs, so there is no idle one to evict
        missing = max(length - self._cells.length(slot.id), 0)
        if missing > self._cells.free:
            return False
        self._cells.extend(slot.id, missing)
        return True

    def place(self, seq: Sequence) -> int:
        return self._slot_of(seq).id

    def commit(self, seq: Sequence) -> None:
        slot = self._slot_of(seq)
        if self._cells.length(slot.id) > seq.computed:
            self._trim(slot, seq.computed)

    def release(self, seq: Sequence) -> None:
        slot = self._slot_of(seq)
        self.commit(seq)
        slot.owner, slot.idle_tokens = None, seq.tokens[: seq.computed]
        seq.kv, seq.computed = None, 0
        if any(other.owner for other in self._slots):
            self._evict(slot)

    def reset(self) -> None:
        for slot in self._slots:
            if slot.owner:
                slot.owner.kv, slot.owner.computed = None, 0
            slot.owner, slot.idle_tokens = None, []
            self._trim(slot, 0)
        dropped = [op.key for op in (*self._taken, *self._ops) if isinstance(op, Drop)]  # perhaps not yet
        keys = dict.fromkeys([*dropped, *(each.key for each in self._snapshots)])
        self._ops = [*(Trim(slot.id, 0) for slot in self._slots), *(Drop(key) for key in keys)]
        self._snapshots = []

    def take_ops(self) -> tuple[Op, ...]:
        self._taken, self._ops = tuple(self._ops), []
        return self._taken

    # -- what can be used again ------------------------------------------------------------------------------------

    def _best_match(self, tokens: list[int]) -> _Match:
        """Find the longest usable prefix: of the idle slot, of a running one, of a snapshot worth loading."""
        best = _Match(0)
        for slot in self._slots:
            if slot.owner is None or self._info.can_copy:
                length = self._usable(slot.tokens, slot.length, tokens)
                if length > best.length:
                    best = _Match(length, slot)
        for snapshot in reversed(self._snapshots):
            length = self._usable(snapshot.tokens, len(snapshot.tokens), tokens)
            if length >= best.length + MIN_SNAPSHOT_LEN:
                best = _Match(length, snapshot)
        return best

    def _usable(self, cached: list[int], length: int, tokens: list[int]) -> int:
        """Return how much of a cache of `length` positions serves; one that cannot be cut serves whole or not."""
        most = len(tokens) - 1
        common = min(common_prefix_len(cached, tokens), length)
        if self._info.can_trim:
            return min(common, most)
        return length if common == length <= most else 0

    def _has_room(self, seq: Sequence, match: _Match) -> bool:
        """Tell whether all of a sequence fits beside what the running ones are going to compute."""
        running = [slot for slot in self._slots if slot.owner]
        if not running:
            return True  # the cache holds at least one sequence of full length
        promised = sum(max(len(slot.tokens) - self._cells.length(slot.id), 0) for slot in running)
        held = match.length if isinstance(match.source, Slot) else 0
        loaded = len(match.source.tokens) if isinstance(match.source, Snapshot) else 0
        needed = max(len(seq.tokens) + 1 - held, loaded)
        return needed + promised + SPARE_LEN * len(running) <= self._cells.free

    def _take_slot(self, match: _Match) -> Slot:
        """Return a slot that holds exactly the match."""
        source = match.source
        if isinstance(source, Slot) and source.owner is None:
            if source.length - match.length >= MIN_SNAPSHOT_LEN:
                self._save(source)
            self._trim(source, match.length)
            return source
        slot = next(slot for slot in self._slots if slot.owner is None)
        if isinstance(source, Slot):
            self._ops.append(Copy(source.id, slot.id, match.length))
            self._cells.share(source.id, slot.id, match.length)
        elif source:
            self._touch(source)
            self._ops.append(Load(source.key, slot.id))
            self._cells.extend(slot.id, len(source.tokens))
            self._trim(slot, match.length)
        return slot

    # -- idle slots and snapshots ----------------------------------------------------------------------------------

    def _idle(self) -> Slot | None:
        return next((slot for slot in self._slots if slot.idle_tokens), None)

    def _evict(self, slot: Slot) -> None:
        self._save(slot)
        self._trim(slot, 0)
        slot.idle_tokens = []

    def _save(self, slot: Slot) -> None:
        """Keep a snapshot of an idle slot if it is worth it and fits."""
        tokens = list(slot.idle_tokens)
        if not MIN_SNAPSHOT_LEN <= len(tokens) <= self._max_snapshot_tokens:
            return
        if any(self._covers(each.tokens, tokens) for each in self._snapshots):
            return
        for each in [each for each in self._snapshots if self._covers(tokens, each.tokens)]:
            self._drop(each)
        kept = sum(len(each.tokens) for each in self._snapshots)
        while kept + len(tokens) > self._max_snapshot_tokens or len(self._snapshots) >= MAX_SNAPSHOTS:
            kept -= len(self._snapshots[0].tokens)
            self._drop(self._snapshots[0])
        snapshot = Snapshot(next(self._keys), tokens)
        self._snapshots.append(snapshot)
        self._ops.append(Save(slot.id, snapshot.key))

    def _covers(self, longer: list[int], tokens: list[int]) -> bool:
        """Tell whether a cache of `longer` serves all that one of `tokens` would."""
        return longer == tokens or (self._info.can_trim and longer[: len(tokens)] == tokens)

    def _touch(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._snapshots.append(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._ops.append(Drop(snapshot.key))

    def _trim(self, slot: Slot, length: int) -> None:
        if self._cells.length(slot.id) > length:
            self._cells.trim(slot.id, length)
            self._ops.append(Trim(slot.id, length))

    def _slot_of(self, seq: Sequence) -> Slot:
        assert isinstance(seq.kv, Slot)
        assert seq.kv.owner is seq
        return seq.kv
