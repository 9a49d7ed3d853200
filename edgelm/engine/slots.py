"""SlotKV: who holds which of llama.cpp's sequence ids, and which prefixes of the past can be used again.

Owns integers: the tokens behind each slot, each snapshot and each file, and the order in which they were last used.
What is to be done on the device leaves as ops of the next step. Knows nothing of llama.cpp's functions.

    slots      running │ running │ idle: only the last one, and only while nothing else runs │ empty …
    snapshots  copies of idle slots in RAM, least recently used first out
    files      copies of snapshots, written when nothing runs, when one has to go, and at the end

Cells of an idle sequence make the steps of every other one slower (8,192 of them: 3.5 times), so idle prefixes leave
the cache for a snapshot as soon as another sequence runs. Some caches cannot be cut (recurrent states, and what is
mixed with them; sliding windows, over whose past new tokens are written): their prefixes serve whole or not at all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from edgelm.core import Copy, Drop, ExecutorInfo, Load, Op, Save, Sequence, Snapshots, Store, StoredPrefix, Trim
from edgelm.engine.cells import Cells
from edgelm.engine.prefixes import MIN_PREFIX_LEN, PrefixIndex, Tokens, common_prefix_len

MAX_SNAPSHOTS = 256
MIN_STORED_LEN = 256
SPARE_LEN = 16  # positions left to each running sequence when another one is admitted
WORTH_WAITING_LEN = 8  # tokens that another sequence is about to compute: a step of their own takes longer


@dataclass(eq=False, slots=True)
class Slot:
    """One of llama.cpp's sequence ids."""

    id: int
    owner: Sequence | None = None
    idle_tokens: list[int] = field(default_factory=list)  # what it holds while nobody owns it
    idle_owner: str = ""  # and whose that is

    @property
    def tokens(self) -> list[int]:
        """The tokens whose KV is final; the owner's list may be longer than `length`."""
        return self.owner.tokens if self.owner else self.idle_tokens

    @property
    def length(self) -> int:
        return self.owner.computed if self.owner else len(self.idle_tokens)

    @property
    def user(self) -> str:
        """Whose tokens these are."""
        return self.owner.owner if self.owner else self.idle_owner


@dataclass(eq=False, slots=True)
class Snapshot:
    """A copy of a slot in RAM."""

    key: int
    tokens: Tokens
    owner: str
    nbytes: int  # as expected, then as measured
    stored: bool = False  # a file holds it, or is about to
    fetched: bool = False  # from a file, only to be loaded


@dataclass(frozen=True, slots=True)
class _Match:
    """`length` positions of `source` are what a sequence begins with."""

    length: int
    source: Slot | Snapshot | StoredPrefix | None = None


class SlotKV:
    """The `KVCache` of the llama executor. `snapshot_bytes` bounds the snapshots in RAM; `store` holds them.

    Prefixes of fewer than `min_stored_len` tokens are not worth a file.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        snapshot_bytes: int,
        store: Snapshots | None = None,
        min_stored_len: int = MIN_STORED_LEN,
    ) -> None:
        self._info = info
        self._store = store
        self._cells = Cells(info.max_sequences, info.capacity)
        self._slots = [Slot(i) for i in range(info.max_sequences)]
        self._snapshots: PrefixIndex[Snapshot] = PrefixIndex()
        self._stored: PrefixIndex[StoredPrefix] = PrefixIndex()
        self._files: tuple[StoredPrefix, ...] = ()  # that `_stored` was made of
        self._keys = itertools.count()
        self._ops: list[Op] = []
        self._taken: tuple[Op, ...] = ()  # by the last step, which may have failed in the middle
        self._unmeasured: list[Snapshot] = []  # saved by the last steps
        self._divisible = info.can_trim and info.keeps_all  # whether a prefix of a prefix is one
        self._max_bytes = snapshot_bytes
        self._min_stored_len = min_stored_len
        self._token_bytes = float(max(info.kv_bytes_per_token, 1))  # of a snapshot
        self._least_bytes = 0  # of a snapshot that has no tail to cut off, whatever its length

    # -- KVCache ---------------------------------------------------------------------------------------------------

    def attach(self, seq: Sequence) -> bool:
        assert seq.kv is None
        assert seq.computed == 0
        if all(slot.owner for slot in self._slots):
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
            self._evict(idle)  # which makes a snapshot, and may drop another
        chosen = self._choose(seq, tokens)
        if chosen is None:
            return False
        match = chosen
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
        slot.owner, slot.idle_tokens, slot.idle_owner = None, seq.tokens[: seq.computed], seq.owner
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
        self._snapshots = PrefixIndex()
        self._unmeasured = []

    def rest(self) -> None:
        if self._store is None or not self._store.keeps_files:
            return
        self._measure()
        idle = self._idle()
        if idle:
            self._save(idle)
        for snapshot in reversed(list(self._snapshots)):  # the last used first: time may be short
            self._keep(snapshot)

    def take_ops(self) -> tuple[Op, ...]:
        self._taken, self._ops = tuple(self._ops), []
        saved = {op.key for op in self._taken if isinstance(op, Save)}
        self._unmeasured += [each for each in self._snapshots if each.key in saved] if saved else []
        return self._taken

    def close(self) -> None:
        if self._store:
            self._store.flush()

    # -- what can be used again ------------------------------------------------------------------------------------

    def _choose(self, seq: Sequence, tokens: Tokens) -> _Match | None:
        """Return the longest prefix that can be had and that there is room for; None: there is none for the rest."""
        while True:
            match = self._best_match(seq, tokens)
            if not self._has_room(seq, match):
                return _Match(0) if self._has_room(seq, _Match(0)) else None
            source = match.source
            if not isinstance(source, StoredPrefix):
                return match
            assert self._store
            key = next(self._keys)
            if self._store.fetch(source.name, key):
                return _Match(match.length, Snapshot(key, source.tokens, source.owner, 0, fetched=True))

    def _best_match(self, seq: Sequence, tokens: Tokens) -> _Match:
        """Find the longest usable prefix: of the idle slot, of a running one, of a snapshot or file worth loading."""
        best = _Match(0)
        most = len(tokens) - 1
        for slot in self._slots:
            if slot.user == seq.owner and (slot.owner is None or self._info.can_copy):
                common = min(common_prefix_len(slot.tokens, seq.tokens), slot.length)
                length = self._usable(common, slot.length, most)
                if length > best.length:
                    best = _Match(length, slot)
        for index in (self._snapshots, self._files_index()):
            for prefix, common in index.matches(seq.owner, tokens):
                length = self._usable(common, len(prefix.tokens), most)
                if length >= best.length + MIN_PREFIX_LEN and len(prefix.tokens) <= self._info.capacity:
                    best = _Match(length, prefix)
        return best

    def _usable(self, common: int, length: int, most: int) -> int:
        """Return how much of a cache of `length` positions serves; one that cannot be cut serves whole or not."""
        usable = min(common, most)
        return usable if self._divisible or usable == length else 0

    def _comes_soon(self, seq: Sequence, match: _Match) -> bool:
        """Tell whether a running prompt is about to compute more of what a sequence begins with than there is.

        To wait for it takes a step: one prompt at a time is computed, and its step is planned when this is asked.
        """
        if not (self._info.can_copy and self._divisible):
            return False
        for slot in self._slots:
            if slot.owner and slot.user == seq.owner and slot.length < len(slot.tokens) - 1:
                common = min(common_prefix_len(slot.tokens, seq.tokens), len(seq.tokens) - 1)
                if common > slot.length and common >= match.length + WORTH_WAITING_LEN:
                    return True
        return False

    def _has_room(self, seq: Sequence, match: _Match) -> bool:
        """Tell whether all of a sequence fits beside what the running ones are going to compute."""
        running = [slot for slot in self._slots if slot.owner]
        if not running:
            return True  # the cache holds at least one sequence of full length
        promised = sum(max(len(slot.tokens) - self._cells.length(slot.id), 0) for slot in running)
        held = match.length if isinstance(match.source, Slot) else 0
        loaded = len(match.source.tokens) if isinstance(match.source, Snapshot | StoredPrefix) else 0
        needed = max(len(seq.tokens) + 1 - held, loaded)
        return needed + promised + SPARE_LEN * len(running) <= self._cells.free

    def _take_slot(self, match: _Match) -> Slot:
        """Return a slot that holds exactly the match."""
        source = match.source
        if isinstance(source, Slot) and source.owner is None:
            if source.length - match.length >= MIN_PREFIX_LEN:
                self._save(source)
            self._trim(source, match.length)
            return source
        slot = next(slot for slot in self._slots if slot.owner is None)
        if isinstance(source, Slot):
            self._ops.append(Copy(source.id, slot.id, match.length))
            self._cells.share(source.id, slot.id, match.length)
        elif isinstance(source, Snapshot):
            self._ops.append(Load(source.key, slot.id))
            if source.fetched:
                self._ops.append(Drop(source.key))
            else:
                self._snapshots.touch(source)
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
        """Keep a snapshot of a slot if it is worth it and fits."""
        tokens, owner = np.array(slot.tokens[: slot.length], np.int32), slot.user
        nbytes = max(int(self._token_bytes * len(tokens)), self._least_bytes)
        if len(tokens) < MIN_PREFIX_LEN or nbytes > self._max_bytes:
            return
        known = list(self._snapshots.matches(owner, tokens))
        if any(self._covers(each, len(tokens), common) for each, common in known):
            return
        snapshot = Snapshot(next(self._keys), tokens, owner, nbytes)
        for each, common in known:
            if self._covers(snapshot, len(each.tokens), common):
                self._drop(each)
        kept = sum(each.nbytes for each in self._snapshots)
        for oldest in self._snapshots:
            if kept + nbytes <= self._max_bytes and len(self._snapshots) < MAX_SNAPSHOTS:
                break
            kept -= oldest.nbytes
            self._keep(oldest)
            self._drop(oldest)
        self._snapshots.add(snapshot)
        self._ops.append(Save(slot.id, snapshot.key))

    def _covers(self, other: Snapshot | StoredPrefix, length: int, common: int) -> bool:
        """Tell whether another serves all that one of `length` tokens would, of which `common` are equal."""
        return common == length and (len(other.tokens) == length or self._divisible)

    def _drop(self, snapshot: Snapshot) -> None:
        self._snapshots.remove(snapshot)
        self._ops.append(Drop(snapshot.key))

    def _keep(self, snapshot: Snapshot) -> None:
        """Have a snapshot written to a file, unless one holds it."""
        if self._store is None or not self._store.keeps_files or snapshot.stored:
            return
        if len(snapshot.tokens) < self._min_stored_len:
            return
        snapshot.stored = True
        files = self._files_index().matches(snapshot.owner, snapshot.tokens)
        if not any(self._covers(each, len(snapshot.tokens), common) for each, common in files):
            self._ops.append(Store(snapshot.key, snapshot.tokens, snapshot.owner))

    def _measure(self) -> None:
        """Take the true sizes of the snapshots that the last steps saved, and what that says about others."""
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
            if self._info.can_trim:
                self._token_bytes = max(self._token_bytes, nbytes / len(snapshot.tokens))
            else:
                self._least_bytes = max(self._least_bytes, nbytes)

    def _files_index(self) -> PrefixIndex[StoredPrefix]:
        """Return the files by their tokens, as they are now."""
        files = self._store.files() if self._store else ()
        if files is not self._files:
            self._files, self._stored = files, PrefixIndex()
            for each in files:
                if len(each.tokens) >= MIN_PREFIX_LEN:
                    self._stored.add(each)
        return self._stored

    def _trim(self, slot: Slot, length: int) -> None:
        if self._cells.length(slot.id) > length:
            self._cells.trim(slot.id, length)
            self._ops.append(Trim(slot.id, length))

    def _slot_of(self, seq: Sequence) -> Slot:
        assert isinstance(seq.kv, Slot)
        assert seq.kv.owner is seq
        return seq.kv
