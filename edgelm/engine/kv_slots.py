"""SlotKV: which sequences hold which of llama.cpp's sequence ids, and which prefixes can be reused.

Owns integers: the tokens of each slot, snapshot and file, and the order of their last use. Effects on the device
leave as ops of the next step. Knows nothing of llama.cpp's functions.

    slots      running │ running │ idle: only the last one, and only while nothing runs │ empty …
    snapshots  copies of idle slots in RAM, evicted least recently used first, shared prefixes last
    files      copies of snapshots: some when nothing runs and on eviction (idle_writes.py), all at the end

Cells of an idle sequence slow down the steps of all others (8,192 of them: 3.5 times), so idle prefixes move from the
cache to a snapshot as soon as another sequence runs. Some caches are not divisible (recurrent states, hybrids of them,
and sliding windows, in which new tokens overwrite old positions): their prefixes can be reused only as a whole. So
snapshots of running slots are saved too (save_points.py). The idle slot can also be cut by the few tokens that its
states can go back (`rollback_len`), if it ran alone: so it keeps a rejected draft until it is known where to cut.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from edgelm.engine.cells import Cells
from edgelm.engine.core import (
    Copy,
    Drop,
    ExecutorInfo,
    KVRegion,
    Load,
    OnSaving,
    Op,
    Save,
    Sequence,
    Snapshots,
    Store,
    StoredPrefix,
    Trim,
)
from edgelm.engine.idle_writes import EVICTED_SHARE, GROWN_SHARE, IdleWrites, asked_len
from edgelm.engine.prefixes import MIN_PREFIX_LEN, MIN_STORED_LEN, FileIndex, PrefixIndex, Tokens, common_prefix_len
from edgelm.engine.save_points import SAVED_SHARE, StateSizes, dispensable, save_points
from edgelm.engine.shared_prefixes import SHARED_SHARE, BranchPoints, kept_longest

MAX_SNAPSHOTS = 256
SPARE_LEN = 16  # positions left to each running sequence when another one is admitted
WORTH_WAITING_LEN = 8  # tokens that another sequence is about to compute: computing them again takes more than a step


@dataclass(eq=False, slots=True)
class Slot:
    """One of llama.cpp's sequence ids: running with `seq`, or idle with `idle_tokens`, or empty."""

    id: int
    seq: Sequence | None = None
    idle_tokens: list[int] = field(default_factory=list)
    idle_namespace: str = ""
    final: int = 0  # positions before the chunk that runs, or ran last
    shortest: int = 0  # the least length to which a cache that cannot be trimmed can go back, once
    save_at: list[int] = field(default_factory=list)  # lengths at which to make a snapshot, ascending
    asked_len: int = 0  # tokens of the last prompt that its next turn has too
    went_on: bool = False  # its last sequence was not the first request of its conversation

    @property
    def tokens(self) -> list[int]:
        """The tokens whose KV is final are the first `length` of these."""
        return self.seq.tokens if self.seq else self.idle_tokens

    @property
    def length(self) -> int:
        return self.seq.computed if self.seq else len(self.idle_tokens)

    @property
    def cache_namespace(self) -> str:
        return self.seq.cache_namespace if self.seq else self.idle_namespace


@dataclass(eq=False, slots=True)
class Snapshot:
    """A copy of a slot in RAM."""

    key: int
    tokens: Tokens
    cache_namespace: str
    nbytes: int  # as expected, later as measured
    stored: bool = False  # a file holds it, or is about to
    fetched: bool = False  # read from a file, only to be loaded
    shared: bool = False  # several conversations begin with it
    asked_len: int = 0  # as of the slot
    went_on: bool = False  # the same; or a later request began with all of it


@dataclass(frozen=True, slots=True)
class _Match:
    """A sequence begins with the first `length` positions of `source`."""

    length: int
    source: Slot | Snapshot | StoredPrefix | None = None

    @property
    def source_len(self) -> int:
        if isinstance(self.source, Slot):
            return self.source.length
        return len(self.source.tokens) if self.source else 0

    def branches(self, prompt_len: int) -> bool:
        """Tell whether the sequence, of so many tokens, goes on otherwise than the source."""
        return self.length < min(self.source_len, prompt_len - 1)


class SlotKV:
    """The `KVCache` of the llama executor. `snapshot_bytes` limits the snapshots in RAM, which `store` holds.

    The share `shared_share` of it is for the shared prefixes of each namespace. Prefixes of fewer than `min_stored_len`
    tokens are not worth a file.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        snapshot_bytes: int,
        store: Snapshots | None = None,
        min_stored_len: int = MIN_STORED_LEN,
        shared_share: float = SHARED_SHARE,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._store = store
        self._cells = Cells(info.max_sequences, info.capacity)
        self._slots = [Slot(i) for i in range(info.max_sequences)]
        self._snapshots: PrefixIndex[Snapshot] = PrefixIndex()
        self._files = FileIndex(store)
        self._keys = itertools.count()
        self._ops: list[Op] = []
        self._taken: tuple[Op, ...] = ()  # by the last step, which may have failed in the middle
        self._unmeasured: list[Snapshot] = []  # saved by recent steps
        self._alone = True  # whether one sequence ran in the last step
        self._divisible = info.can_trim and info.keeps_all  # whether a part of a prefix can be used
        self._goes_back = not info.can_trim and info.rollback_len > 0
        self._max_bytes = snapshot_bytes
        self._max_shared_bytes = int(snapshot_bytes * shared_share)
        self._min_stored_len = min_stored_len
        self._sizes = StateSizes(max(info.kv_bytes_per_token, 1))
        self._points = BranchPoints(min_stored_len)
        self._writes = IdleWrites(self._divisible, seconds)

    # -- KVCache ---------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        if not any(slot.seq for slot in self._slots):  # an idle slot makes way
            return 0.0
        return 1 - self._cells.free / self._cells.capacity

    def regions(self) -> tuple[KVRegion, ...]:
        size, estimate = self._info.kv_bytes_per_token, self._sizes.estimate
        regions = [
            KVRegion("running", slot.length, slot.length * size, slot.cache_namespace, slot.seq.id)
            if slot.seq
            else KVRegion("idle", slot.length, slot.length * size, slot.cache_namespace)
            for slot in self._slots
            if slot.length
        ]
        for saved in self._snapshots:
            kind: Literal["shared_snapshot", "snapshot"] = "shared_snapshot" if saved.shared else "snapshot"
            regions.append(KVRegion(kind, len(saved.tokens), saved.nbytes, saved.cache_namespace))
        lengths = [(len(file.tokens), file.cache_namespace) for file in (self._store.files() if self._store else ())]
        return (*regions, *(KVRegion("file", length, estimate(length), namespace) for length, namespace in lengths))

    def attach(self, seq: Sequence) -> bool:
        assert seq.kv is None
        assert seq.computed == 0
        if all(slot.seq for slot in self._slots):
            return False
        self._measure()
        tokens = np.array(seq.tokens, np.int32)
        match = self._best_match(seq, tokens)
        if self._comes_soon(seq, match):
            return False
        idle = self._idle()
        if idle and idle is not match.source:
            if isinstance(match.source, Snapshot):
                self._snapshots.touch(match.source)
            self._evict(idle, match.source)  # this makes a snapshot, and may drop others
        chosen = self._choose(seq, tokens)
        if chosen is None:
            return False
        branches = self._divisible and chosen.branches(len(tokens))
        went_on = self._goes_on(seq, chosen)
        slot = self._take_slot(seq, chosen)
        slot.seq, slot.idle_tokens, slot.final = seq, [], chosen.length
        slot.asked_len, slot.went_on = asked_len(seq.prompt_len), went_on
        seq.kv, seq.computed = slot, chosen.length
        slot.save_at = [] if self._divisible else self._save_points(slot, tokens)
        self._save_if_due(slot)
        if branches and self._points.is_shared(seq.cache_namespace, tokens[: chosen.length]):
            self._save(slot, shared=True)
        return True

    def grow(self, seq: Sequence, length: int) -> bool:
        slot = self._slot_of(seq)  # a sequence runs, so there is no idle slot to evict
        missing = length - self._cells.length(slot.id)
        if missing > self._cells.free:
            return False
        if missing < 0:
            self._cells.trim(slot.id, length)  # of a draft that was cut: no step has written them
        else:
            self._cells.extend(slot.id, missing)
        return True

    def kv_location(self, seq: Sequence) -> int:
        return self._slot_of(seq).id

    def state_span(self, seq: Sequence, start: int, num_tokens: int, rows: int) -> None:
        return None  # llama.cpp keeps the states with the KV

    def commit(self, seq: Sequence) -> None:
        slot = self._slot_of(seq)
        self._end_chunk(slot)
        self._trim(slot, seq.computed, seq)
        slot.final = seq.computed
        self._save_if_due(slot)

    def chunk_end(self, seq: Sequence, end: int) -> int:
        return next((point for point in self._slot_of(seq).save_at if seq.computed < point < end), end)

    def keeps(self, seq: Sequence) -> bool:
        return self._sizes.estimate(seq.computed) <= self._max_bytes

    def release(self, seq: Sequence, resumes: bool = False) -> None:
        slot = self._slot_of(seq)
        self._end_chunk(slot)
        if seq.pictures or not self._goes_back or seq.computed < slot.shortest:
            self._trim(slot, seq.computed, seq)
        self._save_if_due(slot)
        slot.seq, slot.idle_tokens, slot.idle_namespace = None, seq.tokens[: seq.computed], seq.cache_namespace
        seq.kv, seq.computed = None, 0
        if any(other.seq for other in self._slots):
            self._evict(slot)

    def reset(self) -> None:
        for slot in self._slots:
            if slot.seq:
                slot.seq.kv, slot.seq.computed = None, 0
            slot.seq, slot.idle_tokens, slot.final = None, [], 0
            self._trim(slot, 0)
        dropped = [op.key for op in (*self._taken, *self._ops) if isinstance(op, Drop)]  # these may not be done
        keys = dict.fromkeys([*dropped, *(snapshot.key for snapshot in self._snapshots)])
        self._ops = [*(Trim(slot.id, 0) for slot in self._slots), *(Drop(key) for key in keys)]
        self._snapshots = PrefixIndex()
        self._unmeasured = []
        self._writes.forget()

    def flush_idle(self, ends: bool) -> None:
        if self._store is None or not self._store.keeps_files:
            return
        self._store.drop_prefetched()  # its request was cancelled
        self._measure()
        grown = None if ends else GROWN_SHARE
        idle = self._idle()
        if idle and (grown is None or (idle.went_on and self._has_grown(idle, grown))):
            self._save(idle)
        recent_first = list(self._snapshots)[::-1]  # time may be short
        for snapshot in sorted(recent_first, key=lambda snapshot: bool(self._continuing(snapshot))):  # ends first
            self._keep(snapshot, grown)

    def take_ops(self) -> tuple[Op, ...]:
        self._alone = sum(slot.seq is not None for slot in self._slots) <= 1
        self._taken, self._ops = tuple(self._ops), []
        saved = {op.key for op in self._taken if isinstance(op, Save)}
        self._unmeasured += [snapshot for snapshot in self._snapshots if snapshot.key in saved] if saved else []
        return self._taken

    def close(self, on_saving: OnSaving) -> None:
        if self._store:
            self._store.flush(on_saving)

    # -- reusable prefixes -----------------------------------------------------------------------------------------

    def _choose(self, seq: Sequence, tokens: Tokens) -> _Match | None:
        """Return the longest available prefix that there is room for; None: the sequence has to wait.

        There is no room for it, or a file is being read while others run. One of an editor is read at once.
        """
        others_run = any(slot.seq for slot in self._slots)
        while True:
            match = self._best_match(seq, tokens)
            if not self._has_room(seq, match):
                return _Match(0) if self._has_room(seq, _Match(0)) else None
            source = match.source
            if not isinstance(source, StoredPrefix):
                return match
            assert self._store
            if others_run and not seq.interactive and not self._store.prefetch(source.name):
                return None
            key = next(self._keys)
            if self._store.fetch(source.name, key):
                return _Match(match.length, self._fetched(key, source))

    def _fetched(self, key: int, file: StoredPrefix) -> Snapshot:
        asked = asked_len(len(file.tokens))  # the end of its prompt is not known
        return Snapshot(key, file.tokens, file.cache_namespace, 0, fetched=True, shared=file.shared, asked_len=asked)

    def _best_match(self, seq: Sequence, tokens: Tokens) -> _Match:
        """Return the longest usable prefix: in an idle or running slot, or in a snapshot or file worth loading."""
        best = _Match(0)
        max_len = len(tokens) - 1
        for slot in self._slots:
            if slot.cache_namespace == seq.cache_namespace and (slot.seq is None or self._info.can_copy):
                common = min(common_prefix_len(slot.tokens, seq.tokens), slot.length)
                length = self._usable(seq, common, slot.length, max_len, None if slot.seq else slot.shortest)
                if length > best.length:
                    best = _Match(length, slot)
        for index in self._indexes():
            least = best.length + MIN_PREFIX_LEN
            for prefix, common in index.matches(seq.cache_namespace, tokens):
                length = self._usable(seq, common, len(prefix.tokens), max_len)
                if length < least or len(prefix.tokens) > self._info.capacity:
                    continue
                if (length, -len(prefix.tokens)) > (best.length, -best.source_len):  # a shorter one is loaded faster
                    best = _Match(length, prefix)
        return best

    def _indexes(self) -> tuple[PrefixIndex[Snapshot] | FileIndex, ...]:
        return self._snapshots, self._files

    def _usable(self, seq: Sequence, common: int, length: int, max_len: int, shortest: int | None = None) -> int:
        """Return how many positions of a prefix of `length` can be used. It ends within no picture.

        If it is not divisible, it is all or none, or so many that its states can go back: at least `shortest`.
        """
        usable = min(common, max_len)
        if seq.pictures and (span := seq.picture_at(usable)):
            usable = span.start
        goes_back = self._goes_back and shortest is not None and usable >= shortest
        return usable if self._divisible or usable == length or goes_back else 0

    def _comes_soon(self, seq: Sequence, match: _Match) -> bool:
        """Tell whether a running prompt is about to compute a longer prefix of a sequence than the match.

        Waiting takes one step: only one prompt at a time is computed, and its step is being planned now.
        """
        if not (self._info.can_copy and self._divisible):
            return False
        for slot in self._slots:
            if slot.seq and slot.cache_namespace == seq.cache_namespace and slot.length < len(slot.tokens) - 1:
                common = min(common_prefix_len(slot.tokens, seq.tokens), len(seq.tokens) - 1)
                if common > slot.length and common >= match.length + WORTH_WAITING_LEN:
                    return True
        return False

    def _has_room(self, seq: Sequence, match: _Match) -> bool:
        """Tell whether a whole sequence fits beside what the running ones are still going to compute."""
        running = [slot for slot in self._slots if slot.seq]
        if not running:
            return True  # the cache holds at least one sequence of full length
        promised = sum(max(len(slot.tokens) - self._cells.length(slot.id), 0) for slot in running)
        held = match.length if isinstance(match.source, Slot) else 0
        loaded = len(match.source.tokens) if isinstance(match.source, Snapshot | StoredPrefix) else 0
        needed = max(len(seq.tokens) + 1 - held, loaded)
        return needed + promised + SPARE_LEN * len(running) <= self._cells.free

    def _goes_on(self, seq: Sequence, match: _Match) -> bool:
        """Tell whether a sequence continues a conversation: not a shared prefix, and not itself after a preemption.

        A snapshot that it uses as a whole is marked.
        """
        source = match.source
        if source is None or isinstance(source, StoredPrefix):
            return False
        is_later = seq.cached is None and not (isinstance(source, Slot) and source.seq)  # or a choice of one request
        continues = (source.went_on or is_later) and match.length >= source.asked_len
        if isinstance(source, Snapshot):
            source.went_on |= is_later and match.length == match.source_len
            return continues and not source.shared
        return continues

    def _take_slot(self, seq: Sequence, match: _Match) -> Slot:
        """Return a slot that holds exactly the match, with which the sequence begins."""
        source = match.source
        if isinstance(source, Slot) and source.seq is None:
            if source.length - match.length >= MIN_PREFIX_LEN:
                self._save(source)
            self._trim(source, match.length, seq)
            return source
        slot = next(slot for slot in self._slots if slot.seq is None)
        if isinstance(source, Slot):
            self._ops.append(Copy(source.id, slot.id, seq.position(match.length)))
            self._cells.share(source.id, slot.id, match.length)
            source.shortest = source.length
        elif isinstance(source, Snapshot):
            self._ops.append(Load(source.key, slot.id))
            if source.fetched:
                self._ops.append(Drop(source.key))
            else:
                self._snapshots.touch(source)
            self._cells.extend(slot.id, len(source.tokens))
            self._trim(slot, match.length, seq)
        slot.shortest = match.length
        return slot

    # -- idle slots and snapshots ----------------------------------------------------------------------------------

    def _idle(self) -> Slot | None:
        return next((slot for slot in self._slots if slot.idle_tokens), None)

    def _evict(self, slot: Slot, needed: object = None) -> None:
        self._save(slot, needed)
        self._trim(slot, 0)
        slot.idle_tokens = []

    def _save_points(self, slot: Slot, tokens: Tokens) -> list[int]:
        """Return the lengths at which to make snapshots of a slot that begins to compute `tokens`."""
        assert slot.seq
        others = [other for other in self._slots if other is not slot and other.cache_namespace == slot.cache_namespace]
        shared = max((common_prefix_len(other.tokens, slot.tokens) for other in others), default=0)
        kept = []
        for index in self._indexes():
            for prefix, common in index.matches(slot.cache_namespace, tokens):
                shared = max(shared, common)
                if common == len(prefix.tokens):
                    kept.append(common)
        points = save_points(slot.length, slot.seq.prompt_len, shared, kept)
        return [point for point in points if self._sizes.estimate(point) * SAVED_SHARE <= self._max_bytes]

    def _save_if_due(self, slot: Slot) -> None:
        """Make a snapshot of a running slot where one was planned."""
        while slot.save_at and slot.save_at[0] <= slot.length:
            if slot.save_at.pop(0) == slot.length:
                self._save(slot)

    def _save(self, slot: Slot, needed: object = None, *, shared: bool = False) -> None:
        """Make a snapshot of a slot, if it fits and no other snapshot covers it. `needed` is dropped last for it.

        A shared prefix is kept beside the conversations that begin with it, and written to a file at once.
        """
        tokens, cache_namespace = np.array(slot.tokens[: slot.length], np.int32), slot.cache_namespace
        nbytes = self._sizes.estimate(len(tokens))
        if len(tokens) < MIN_PREFIX_LEN or nbytes > (self._max_shared_bytes if shared else self._max_bytes):
            return
        similar = list(self._snapshots.matches(cache_namespace, tokens))
        rivals = [(other, common) for other, common in similar if other.shared] if shared else similar
        covering = [other for other, common in rivals if self._covers(other, len(tokens), common)]
        for other in covering:
            other.went_on |= slot.went_on
        if covering:
            return
        snapshot = Snapshot(next(self._keys), tokens, cache_namespace, nbytes, shared=shared)
        snapshot.asked_len, snapshot.went_on = slot.asked_len, slot.went_on
        for other, common in similar:
            if not other.shared and self._covers(snapshot, len(other.tokens), common):
                self._drop(other)
        used = sum(other.nbytes for other in self._snapshots)
        first = [other for other in self._dispensable(snapshot, similar) if other is not needed]
        last = self._kept_longest()
        order = dict.fromkeys((*first, *(other for other in self._snapshots if other not in last), *self._snapshots))
        self._snapshots.add(snapshot)
        for other in order:
            if used + nbytes <= self._max_bytes and len(self._snapshots) <= MAX_SNAPSHOTS:
                break
            used -= other.nbytes
            self._keep(other, EVICTED_SHARE)
            self._drop(other)
        self._trim(slot, slot.length, slot.seq)
        self._ops.append(Save(slot.id, snapshot.key))
        if shared:
            self._keep(snapshot)

    def _kept_longest(self) -> set[Snapshot]:
        """Return the snapshots of shared prefixes that are evicted after all others."""
        shared = [snapshot for snapshot in list(self._snapshots)[::-1] if snapshot.shared]
        return kept_longest(((one, one.cache_namespace, one.nbytes) for one in shared), self._max_shared_bytes)

    def _dispensable(self, snapshot: Snapshot, similar: list[tuple[Snapshot, int]]) -> list[Snapshot]:
        """Return the snapshots of prefixes of this one that can go before any other conversation's."""
        if self._divisible:
            return []
        lengths = [(len(other.tokens), common) for other, common in similar]
        return [similar[index][0] for index in dispensable(len(snapshot.tokens), lengths)]

    def _is_dispensable(self, snapshot: Snapshot) -> bool:
        """Tell whether a snapshot is dispensable beside the longest one that continues it."""
        longest = max(self._continuing(snapshot), key=lambda other: len(other.tokens), default=None)
        if longest is None:
            return False
        similar = list(self._snapshots.matches(longest.cache_namespace, longest.tokens))
        return snapshot in self._dispensable(longest, similar)

    def _continuing(self, snapshot: Snapshot) -> list[Snapshot]:
        """Return the snapshots that begin with this one."""
        similar = self._snapshots.matches(snapshot.cache_namespace, snapshot.tokens)
        return [other for other, common in similar if common == len(snapshot.tokens) < len(other.tokens)]

    def _covers(self, other: Snapshot | StoredPrefix, length: int, common: int) -> bool:
        """Tell whether another prefix replaces one of `length` tokens, of which `common` are equal."""
        return common == length and (len(other.tokens) == length or self._divisible)

    def _drop(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._ops.append(Drop(snapshot.key))

    def _keep(self, snapshot: Snapshot, grown: float | None = None) -> None:
        """Write a snapshot to a file, unless a file covers it.

        With `grown`, only if its conversation went on, and it is longer by this share than what files have of it.
        """
        if self._store is None or not self._store.keeps_files or snapshot.stored:
            return
        if len(snapshot.tokens) < self._min_stored_len or self._is_dispensable(snapshot):
            return
        for file, common in self._files.matches(snapshot.cache_namespace, snapshot.tokens):
            if file.shared >= snapshot.shared and self._covers(file, len(snapshot.tokens), common):
                snapshot.stored = True
                return
        if grown is not None and not (
            snapshot.went_on and self._has_grown(snapshot, grown) and self._writes.take(snapshot.nbytes)
        ):
            return
        snapshot.stored = True
        self._writes.add(snapshot.cache_namespace, snapshot.tokens)
        self._ops.append(Store(snapshot.key, snapshot.tokens, snapshot.cache_namespace, snapshot.shared))

    def _has_grown(self, prefix: Slot | Snapshot, share: float) -> bool:
        """Tell whether a prefix, of an idle slot or a snapshot, is longer by a share than what files have of it."""
        tokens, cache_namespace = np.array(prefix.tokens, np.int32), prefix.cache_namespace
        return self._writes.has_grown(cache_namespace, tokens, self._files.matches(cache_namespace, tokens), share)

    def _measure(self) -> None:
        """Take the true sizes of snapshots that recent steps saved, and correct the estimate for others."""
        if self._store is None:
            return
        unmeasured, self._unmeasured = self._unmeasured, []
        kept = set(self._snapshots)
        for snapshot in unmeasured:
            if snapshot not in kept:
                continue
            nbytes = self._store.nbytes(snapshot.key)
            if nbytes is None:
                self._drop(snapshot)
                continue
            snapshot.nbytes = nbytes
            self._sizes.add(len(snapshot.tokens), nbytes)

    def _trim(self, slot: Slot, length: int, seq: Sequence | None = None) -> None:
        """Cut a slot to `length` tokens, with which `seq` begins."""
        if self._cells.length(slot.id) > length:
            self._cells.trim(slot.id, length)
            slot.shortest = length
            self._ops.append(Trim(slot.id, seq.position(length) if seq else length))

    def _end_chunk(self, slot: Slot) -> None:
        """Note how far the states behind the chunk that ran can go back; the one before its first token is lost.

        Where others ran too, it can only before the next step: llama.cpp loses the earlier states of those it moves.
        """
        end = self._cells.length(slot.id)
        if end > slot.final:
            slot.shortest = max(slot.final + 1, end - self._info.rollback_len) if self._alone else end

    def _slot_of(self, seq: Sequence) -> Slot:
        assert isinstance(seq.kv, Slot)
        assert seq.kv.seq is seq
        return seq.kv
