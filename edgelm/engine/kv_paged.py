"""PagedKV: which sequences hold which blocks of KV memory, and which prefixes can be reused.

Owns integers: block tables, how many sequences refer to each block, and a digest of the content of each full block. A
digest covers all tokens up to the block's end, so two blocks with one digest hold the same KV, and a sequence that
begins with the same tokens shares the block: nothing is copied. Knows nothing of tensors or devices.

    block      referred to by sequences │ idle: held by none, its content can be reused │ empty

Empty blocks are taken before idle ones, and idle ones least recently used first, those of shared prefixes last
(shared_prefixes.py). A sequence releases its blocks from the tail, so the tail of a prefix is evicted before its head,
without which the tail is useless.

With a store that keeps files, idle prefixes are saved at the end, and some when nothing runs (idle_writes.py). A later
process loads the blocks that it does not have into new ones: Save and Load name the blocks, and the store holds a
snapshot only on its way.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from edgelm.engine.core import (
    Drop,
    ExecutorInfo,
    KVRegion,
    Load,
    OnSaving,
    Op,
    Save,
    Sequence,
    Snapshots,
    StateSpan,
    Store,
)
from edgelm.engine.idle_writes import GROWN_SHARE, IdleWrites, asked_len
from edgelm.engine.prefixes import MIN_PREFIX_LEN, MIN_STORED_LEN, FileIndex
from edgelm.engine.save_points import MIN_GAIN_LEN, dispensable
from edgelm.engine.shared_prefixes import SHARED_SHARE, BranchPoints, SharedChains
from edgelm.engine.state_slots import StateSlots

BLOCK_LEN = 16
SPARE_LEN = 16  # positions left to each running sequence when another one is admitted


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one running sequence, in the order of its positions."""

    seq: Sequence
    blocks: list[int]
    num_full: int  # leading blocks whose content is final
    location: tuple[int, ...] = ()  # a copy of `blocks` for chunks; empty: to be made


class _Link(NamedTuple):
    """The place of a reusable block in its prefix."""

    previous: bytes  # digest of the block before it; empty: it is the first one
    tokens: bytes  # int32; empty: there is no store
    cache_namespace: str


class PagedKV:
    """The `KVCache` of an executor whose kernels read KV through block tables.

    `store` keeps idle prefixes of at least `min_stored_len` tokens in files; None: they end with the process. The share
    `shared_share` of the blocks is for the shared prefixes of each namespace.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        block_len: int = BLOCK_LEN,
        store: Snapshots | None = None,
        min_stored_len: int = MIN_STORED_LEN,
        shared_share: float = SHARED_SHARE,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        num_blocks = info.capacity // block_len
        assert -(-info.context // block_len) <= num_blocks
        self._info = info
        self._block_len = block_len
        self._refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # of the reusable blocks
        self._reusable: dict[bytes, int] = {}  # block by digest
        self._empty = list(reversed(range(num_blocks)))
        self._idle: dict[int, None] = {}  # least recently used first
        self._idle_last: dict[int, None] = {}  # those of shared prefixes, the same
        self._tables: dict[Sequence, Table] = {}
        self._store = store if store and store.keeps_files else None
        self._min_stored_len = min_stored_len
        self._files = FileIndex(self._store)
        self._links: dict[bytes, _Link] = {}  # of the reusable blocks by digest
        self._num_next: Counter[bytes] = Counter()  # how many reusable blocks continue a block, by its digest
        self._points = BranchPoints(min_stored_len)
        self._shared = SharedChains(int(num_blocks * shared_share))
        num_saved = info.num_states - info.max_sequences
        self._states = (
            StateSlots(info.max_sequences, num_saved, block_len, info.max_draft + 1) if info.num_states else None
        )
        self._keys = itertools.count()
        self._ops: list[Op] = []
        self._taken: tuple[Op, ...] = ()  # by the last step, which may have failed in the middle
        self._chains: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()  # digests, in order of blocks
        self._writes = IdleWrites(self._states is None, seconds)
        self._asked: dict[bytes, bool] = {}  # reusable blocks at the end of a prompt: whether a later request has them

    # -- KVCache ---------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        return 1 - self._num_free / len(self._refs)

    def regions(self) -> tuple[KVRegion, ...]:
        """Return the blocks of each running sequence, those that several share once, and the idle ones by namespace.

        States of recurrent layers count where they belong: one for each running sequence and each file, and those of
        prefixes with the blocks before them.
        """
        size, state_size = self._info.kv_bytes_per_token, self._info.state_bytes
        with_state = {self._reusable.get(digest) for digest in self._states.saved} if self._states else set()
        seen: set[int] = set()
        regions = []
        for seq, table in self._tables.items():
            blocks = set(table.blocks) - seen
            seen |= blocks
            num_tokens = len(blocks) * self._block_len
            nbytes = num_tokens * size + (1 + len(blocks & with_state)) * state_size
            regions.append(KVRegion("running", num_tokens, nbytes, seq.cache_namespace, seq.id))
        idle: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)
        for block in (*self._idle, *self._idle_last):
            digest = self._digests[block]
            assert digest is not None
            idle[self._links[digest].cache_namespace, block in self._idle_last].append(block)
        for (namespace, is_shared), group in idle.items():
            kind: Literal["shared", "idle"] = "shared" if is_shared else "idle"
            num_tokens = len(group) * self._block_len
            nbytes = num_tokens * size + len(with_state.intersection(group)) * state_size
            regions.append(KVRegion(kind, num_tokens, nbytes, namespace))
        files = self._store.files() if self._store else ()
        return (
            *regions,
            *(
                KVRegion("file", len(file.tokens), len(file.tokens) * size + state_size, file.cache_namespace)
                for file in files
            ),
        )

    def attach(self, seq: Sequence) -> bool:
        assert seq.kv is None
        assert seq.computed == 0
        hits = self._hits(seq)
        num_hits = len(hits)
        if self._states:
            hits = hits[: self._states.num_usable(self._digests_of(seq, num_hits))]
        if self._comes_soon(seq, len(hits)) or not self._has_room(seq, hits):
            return False
        for block in hits:
            self._idle.pop(block, None)
            self._idle_last.pop(block, None)
            self._refs[block] += 1
        seq.kv = self._tables[seq] = table = Table(seq, hits, len(hits))
        leaves_file = self._load_stored(table)
        if self._states:
            digests = self._digests_of(seq, max(num_hits, table.num_full))
            self._ops += self._states.begin(seq, digests, table.num_full)
        self._note_shared(seq, table.num_full, leaves_file)
        if seq.cached is None:
            self._asked |= {digest: True for digest in self._digests_of(seq, table.num_full) if digest in self._asked}
        seq.computed = table.num_full * self._block_len
        return True

    def grow(self, seq: Sequence, length: int) -> bool:
        table = self._table_of(seq)
        missing = self._num_blocks(length) - len(table.blocks)
        if missing > self._num_free:
            return False
        if missing > 0:
            table.blocks += [self._take() for _ in range(missing)]
            table.location = ()
        return True

    def chunk_end(self, seq: Sequence, end: int) -> int:
        return self._states.chunk_end(seq, end) if self._states else end

    def kv_location(self, seq: Sequence) -> tuple[int, ...]:
        table = self._table_of(seq)
        table.location = table.location or tuple(table.blocks)
        return table.location

    def state_span(self, seq: Sequence, start: int, num_tokens: int, rows: int) -> StateSpan | None:
        if self._states is None:
            return None
        self._save_state(seq, start)
        return self._states.move(seq, start + num_tokens, num_tokens, rows)

    def commit(self, seq: Sequence) -> None:
        table = self._table_of(seq)
        num_full = seq.computed // self._block_len
        for index in range(table.num_full, num_full):
            self._register(table.blocks[index], seq, index)
        for block in table.blocks[num_full : table.num_full]:  # full blocks that are invalid: the sequence failed
            self._forget(block)
        table.num_full = num_full
        self._cut(table, self._num_blocks(seq.computed + 1))  # the next step certainly writes one more position
        if self._states:
            self._save_state(seq, seq.computed)  # now, so that the next sequence admitted can begin with it

    def keeps(self, seq: Sequence) -> bool:
        if self._states is None:
            return True  # its blocks are idle, and taken last
        lost = seq.computed - self._states.num_usable(self._full_digests(seq)) * self._block_len
        is_decoding = len(seq.tokens) - seq.computed == 1  # a prompt would lose the same tokens at each turn
        return lost < MIN_GAIN_LEN if is_decoding else lost == 0

    def release(self, seq: Sequence, resumes: bool = False) -> None:
        self.commit(seq)
        table = self._table_of(seq)
        asked = asked_len(seq.prompt_len) // self._block_len
        if 0 < asked <= table.num_full and (digest := self._digest(seq, asked - 1)) in self._reusable:
            self._asked.setdefault(digest, False)
        if self._states:
            if not seq.computed:  # it failed
                self._states.forget(self._chains.get(seq, []))
            if resumes:
                self._states.pause(seq, self._full_digests(seq))
            self._states.end(seq)
        self._cut(table, 0)
        del self._tables[seq]
        seq.kv, seq.computed = None, 0

    def reset(self) -> None:
        for seq in self._tables:
            seq.kv, seq.computed = None, 0
        self._tables.clear()
        if self._states:
            self._states.reset()
        num_blocks = len(self._refs)
        self._refs = [0] * num_blocks
        self._digests = [None] * num_blocks
        self._reusable.clear()
        self._links.clear()
        self._asked.clear()
        self._writes.forget()
        self._num_next.clear()
        self._empty = list(reversed(range(num_blocks)))
        self._idle.clear()
        self._idle_last.clear()
        self._ops = [op for op in (*self._taken, *self._ops) if isinstance(op, Drop)]  # these may not be done

    def flush_idle(self, ends: bool) -> None:
        if self._store is None:
            return
        grown = None if ends else GROWN_SHARE
        recent_first = list(self._idle_prefixes())
        shared = [chain for chain in self._shared.kept() if self._reusable.keys() >= set(chain)]
        shared_ends = {chain[length - 1] for chain in shared for length in self._kept_lengths(chain)}
        queued: set[bytes] = set()  # the ends, as several prefixes have those of their common beginning
        for digests in [*recent_first[:1], *shared, *recent_first[1:]]:  # time may be short
            for length in self._kept_lengths(digests):
                end = digests[length - 1]
                if end not in queued:
                    queued.add(end)
                    self._keep(digests[:length], end in shared_ends, grown)

    def take_ops(self) -> tuple[Op, ...]:
        self._taken, self._ops = tuple(self._ops), []
        return self._taken

    def close(self, on_saving: OnSaving) -> None:
        if self._store:
            self._store.flush(on_saving)

    # -- admission -------------------------------------------------------------------------------------------------

    def _hits(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix that leaves a token to compute."""
        hits: list[int] = []
        for index in range((len(seq.tokens) - 1) // self._block_len):
            block = self._reusable.get(self._digest(seq, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def _comes_soon(self, seq: Sequence, num_hits: int) -> bool:
        """Tell whether a running prompt is about to compute the next block of a sequence: waiting takes a step."""
        if self._states or num_hits >= (len(seq.tokens) - 1) // self._block_len:
            return False  # with states: the next block is of no use without one
        return any(
            table.num_full <= num_hits < len(table.seq.tokens) // self._block_len
            and self._digest(table.seq, num_hits) == self._digest(seq, num_hits)
            for table in self._tables.values()
        )

    def _has_room(self, seq: Sequence, hits: list[int]) -> bool:
        """Tell whether a whole sequence fits beside what the running ones are still going to compute."""
        if not self._tables:
            return True  # the cache holds at least one sequence of full length
        promised = sum(
            max(self._num_blocks(len(table.seq.tokens)) - len(table.blocks), 0) for table in self._tables.values()
        )
        spare = self._num_blocks(SPARE_LEN) * len(self._tables)
        needed = self._num_blocks(len(seq.tokens) + 1) - len(hits)
        free = self._num_free - sum(self._refs[block] == 0 for block in hits)
        return needed + promised + spare <= free

    # -- states ----------------------------------------------------------------------------------------------------

    def _save_state(self, seq: Sequence, length: int) -> None:
        """Save the state of a running sequence, if it is due, and behind no more than these tokens."""
        assert self._states
        position = self._states.is_due(seq)
        if 0 < position <= length:
            self._ops += self._states.save(seq, self._digest(seq, position // self._block_len - 1))

    def _full_digests(self, seq: Sequence) -> list[bytes]:
        """Return the digests of the full blocks of a running sequence."""
        return self._chains.get(seq, [])[: self._table_of(seq).num_full]

    # -- files -----------------------------------------------------------------------------------------------------

    def _load_stored(self, table: Table) -> bool:
        """Load more blocks of a prefix from a file, if one has enough of them to be worth it.

        Return whether the file goes on otherwise than the sequence.
        """
        seq, num_hits = table.seq, table.num_full
        fetched = self._fetch(seq, num_hits)
        if fetched is None:
            return False
        key, num_blocks, is_longer = fetched
        table.blocks += [self._take() for _ in range(num_hits, num_blocks)]
        state = self._states.reserve(self._digest(seq, num_blocks - 1)) if self._states else None
        self._ops += [Load(key, tuple(table.blocks[num_hits:]), num_hits, state), Drop(key)]
        for index in range(num_hits, num_blocks):
            self._register(table.blocks[index], seq, index)
        table.num_full = num_blocks
        return is_longer

    def _fetch(self, seq: Sequence, num_hits: int) -> tuple[int, int, bool] | None:
        """Read the file with the most blocks of a sequence; with states, one whose end the sequence reaches.

        Return its key, how many blocks can be used, and whether it has more.
        """
        if self._store is None or (self._states and not self._states.has_room):
            return None
        tokens = np.array(seq.tokens, np.int32)
        least = num_hits + self._num_blocks(MIN_PREFIX_LEN)
        while True:
            name, most, is_longer = "", 0, False
            for file, common in self._files.matches(seq.cache_namespace, tokens):
                num_blocks = min(common, len(tokens) - 1) // self._block_len
                goes_on = len(file.tokens) // self._block_len > num_blocks
                if num_blocks >= max(least, most + 1) and not (goes_on and self._states):
                    name, most, is_longer = file.name, num_blocks, goes_on
            if not name:
                return None
            key = next(self._keys)
            if self._store.fetch(name, key):
                return key, most, is_longer

    def _idle_prefixes(self) -> Iterator[list[bytes]]:
        """Yield the digests of each cached prefix that is not part of a longer one, most recently used first."""
        continued = {link.previous for link in self._links.values()}
        for block in [*reversed(self._idle), *reversed(self._idle_last)]:
            digest = self._digests[block]
            assert digest is not None
            if digest in continued:
                continue
            digests = [digest]
            while (previous := self._links[digests[-1]].previous) in self._links:
                digests.append(previous)
            if not previous:  # or else its head was evicted
                yield digests[::-1]

    def _kept_lengths(self, digests: Seq[bytes]) -> list[int]:
        """Return how many blocks of a prefix to keep: all of them, or with states those before some of these."""
        if self._states is None:
            return [len(digests)]
        *others, last = self._states.lengths(digests) or [0]
        if not last:
            return []
        tokens = [(length * self._block_len,) * 2 for length in others]
        dropped = dispensable(last * self._block_len, tokens)
        return [last, *(length for index, length in enumerate(others) if index not in dropped)]

    def _keep(self, digests: Seq[bytes], is_shared: bool, grown: float | None) -> None:
        """Write the blocks of a prefix to a file, unless a file covers it.

        With `grown`, only if its conversation went on, and it is longer by this share than what files have of it.
        """
        links = [self._links[digest] for digest in digests]
        tokens = np.frombuffer(b"".join(link.tokens for link in links), np.int32)
        namespace = links[0].cache_namespace
        if len(tokens) < self._min_stored_len:
            return
        for file, common in self._files.matches(namespace, tokens):
            covers = len(file.tokens) == common or not self._states
            if common == len(tokens) and covers and file.shared >= is_shared:
                return
        if grown is not None and not is_shared:
            nbytes = len(tokens) * self._info.kv_bytes_per_token + self._info.state_bytes
            went_on = any(self._asked.get(digest) for digest in digests)
            grew = went_on and self._writes.has_grown(namespace, tokens, self._files.matches(namespace, tokens), grown)
            if not grew or not self._writes.take(nbytes):
                return
        self._writes.add(namespace, tokens)
        key = next(self._keys)
        blocks = tuple(self._reusable[digest] for digest in digests)
        state = self._states.slot_of(digests[-1]) if self._states else None
        self._ops += [Save(blocks, key, state), Store(key, tokens, namespace, is_shared), Drop(key)]

    # -- shared prefixes -------------------------------------------------------------------------------------------

    def _note_shared(self, seq: Sequence, num_hits: int, leaves_file: bool) -> None:
        """Note the shared prefixes that a sequence begins with, and whether it leaves one behind its first blocks."""
        digests = self._digests_of(seq, num_hits)
        before = self._shared.last
        self._shared.use(digests)
        if num_hits and (leaves_file or self._num_next[digests[-1]]) and self._leaves_at(seq, num_hits):
            self._shared.add(seq.cache_namespace, digests)
        if self._shared.last is not before:
            idle = [*self._idle, *self._idle_last]
            self._idle_last = {block: None for block in idle if self._digests[block] in self._shared.last}
            self._idle = {block: None for block in idle if block not in self._idle_last}

    def _leaves_at(self, seq: Sequence, num_blocks: int) -> bool:
        """Tell whether another sequence left a longer prefix behind these blocks of one that goes on, too."""
        if num_blocks >= (len(seq.tokens) - 1) // self._block_len:
            return False
        return self._points.is_shared(
            seq.cache_namespace, np.array(seq.tokens[: num_blocks * self._block_len], np.int32)
        )

    # -- blocks ----------------------------------------------------------------------------------------------------

    @property
    def _num_free(self) -> int:
        return len(self._empty) + len(self._idle) + len(self._idle_last)

    def _num_blocks(self, length: int) -> int:
        return -(-length // self._block_len)

    def _take(self) -> int:
        """Return a block for new content; if none is empty, evict the least recently used idle one."""
        if self._empty:
            block = self._empty.pop()
        else:
            idle = self._idle or self._idle_last
            block = next(iter(idle))
            del idle[block]
            self._forget(block)
        self._refs[block] = 1
        return block

    def _cut(self, table: Table, num_blocks: int) -> None:
        """Release the blocks of a table from the tail, until `num_blocks` are left."""
        if len(table.blocks) > num_blocks:
            table.location = ()
        while len(table.blocks) > num_blocks:
            block = table.blocks.pop()
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._digests[block] is None:
                    self._empty.append(block)
                elif self._digests[block] in self._shared.last:
                    self._idle_last[block] = None
                else:
                    self._idle[block] = None

    def _register(self, block: int, seq: Sequence, index: int) -> None:
        """Make a full block of a sequence reusable, unless another block has the same content."""
        digest = self._digest(seq, index)
        if digest not in self._reusable:
            self._reusable[digest] = block
            self._digests[block] = digest
            previous = self._digest(seq, index - 1) if index else b""
            self._num_next[previous] += 1
            first, end = (index * self._block_len, (index + 1) * self._block_len) if self._store else (0, 0)
            self._links[digest] = _Link(previous, array("i", seq.tokens[first:end]).tobytes(), seq.cache_namespace)

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._reusable[digest]
            self._asked.pop(digest, None)
            self._digests[block] = None
            previous = self._links.pop(digest).previous
            self._num_next[previous] -= 1
            if not self._num_next[previous]:
                del self._num_next[previous]

    def _digests_of(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        return [self._digest(seq, index) for index in range(num_blocks)]

    def _digest(self, seq: Sequence, index: int) -> bytes:
        """Return the digest of a sequence's tokens up to the end of a block."""
        chain = self._chains.setdefault(seq, [])
        while len(chain) <= index:
            first = len(chain) * self._block_len
            tokens = array("i", seq.tokens[first : first + self._block_len])
            key = chain[-1] if chain else blake2b(seq.cache_namespace.encode(), digest_size=16).digest()
            chain.append(blake2b(tokens.tobytes(), key=key, digest_size=16).digest())
        return chain[index]

    def _table_of(self, seq: Sequence) -> Table:
        assert isinstance(seq.kv, Table)
        assert seq.kv.seq is seq
        return seq.kv
