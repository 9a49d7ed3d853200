"""PagedKV: which blocks of KV memory belong to whom, and which prefixes of the past can be used again.

Owns integers: block tables, how many sequences refer to each block, and the digest of what a full block holds. A
digest covers all tokens up to the block's end, so two blocks of one digest hold the same KV and a sequence that
begins with the same tokens shares the block: nothing is copied. Knows nothing of tensors or of a device.

    block      referred to by sequences │ idle: nobody's, its content can be used again │ empty

An empty block is taken before an idle one, and the least recently used idle one goes first. A sequence gives its
blocks back from the tail, so that of a prefix the tail goes before the head, without which it is of no use.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from weakref import WeakKeyDictionary

from edgelm.core import ExecutorInfo, Op, Sequence

BLOCK_LEN = 16
SPARE_LEN = 16  # positions left to each running sequence when another one is admitted


@dataclass(eq=False, slots=True)
class Table:
    """The blocks of one running sequence, in the order of its positions."""

    owner: Sequence
    blocks: list[int]
    num_full: int  # leading blocks whose content is final
    place: tuple[int, ...] = field(default=())  # of all blocks; empty: to be made


class PagedKV:
    """The `KVCache` of an executor whose kernels read KV through block tables."""

    def __init__(self, info: ExecutorInfo, block_len: int = BLOCK_LEN) -> None:
        num_blocks = info.capacity // block_len
        assert -(-info.context // block_len) <= num_blocks
        self._block_len = block_len
        self._refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks  # under which a block is known
        self._known: dict[bytes, int] = {}  # block by digest
        self._empty = list(reversed(range(num_blocks)))
        self._idle: dict[int, None] = {}  # least recently used first
        self._tables: dict[Sequence, Table] = {}
        self._chains: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()  # digests, by block

    # -- KVCache ---------------------------------------------------------------------------------------------------

    def attach(self, seq: Sequence) -> bool:
        assert seq.kv is None
        assert seq.computed == 0
        hits = self._hits(seq)
        if not self._has_room(seq, hits):
            return False
        for block in hits:
            self._idle.pop(block, None)
            self._refs[block] += 1
        seq.kv = self._tables[seq] = Table(seq, hits, len(hits))
        seq.computed = len(hits) * self._block_len
        return True

    def grow(self, seq: Sequence, length: int) -> bool:
        table = self._table_of(seq)
        missing = self._num_blocks(length) - len(table.blocks)
        if missing > self._num_free:
            return False
        if missing > 0:
            table.blocks += [self._take() for _ in range(missing)]
            table.place = ()
        return True

    def place(self, seq: Sequence) -> tuple[int, ...]:
        table = self._table_of(seq)
        table.place = table.place or tuple(table.blocks)
        return table.place

    def commit(self, seq: Sequence) -> None:
        table = self._table_of(seq)
        num_full = seq.computed // self._block_len
        for index in range(table.num_full, num_full):
            self._register(table.blocks[index], self._digest(seq, index))
        for block in table.blocks[num_full : table.num_full]:  # what was final no longer is: the sequence failed
            self._forget(block)
        table.num_full = num_full
        self._cut(table, self._num_blocks(seq.computed + 1))  # the next token is written for certain

    def release(self, seq: Sequence) -> None:
        self.commit(seq)
        table = self._table_of(seq)
        self._cut(table, 0)
        del self._tables[seq]
        seq.kv, seq.computed = None, 0

    def reset(self) -> None:
        for seq in self._tables:
            seq.kv, seq.computed = None, 0
        self._tables.clear()
        num_blocks = len(self._refs)
        self._refs = [0] * num_blocks
        self._digests = [None] * num_blocks
        self._known.clear()
        self._empty = list(reversed(range(num_blocks)))
        self._idle.clear()

    def rest(self) -> None: ...

    def take_ops(self) -> tuple[Op, ...]:
        return ()

    def close(self) -> None: ...

    # -- admission -------------------------------------------------------------------------------------------------

    def _hits(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest known prefix that leaves a token to compute."""
        hits: list[int] = []
        for index in range((len(seq.tokens) - 1) // self._block_len):
            block = self._known.get(self._digest(seq, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def _has_room(self, seq: Sequence, hits: list[int]) -> bool:
        """Tell whether all of a sequence fits beside what the running ones are going to compute."""
        if not self._tables:
            return True  # the cache holds at least one sequence of full length
        promised = sum(
            max(self._num_blocks(len(table.owner.tokens)) - len(table.blocks), 0) for table in self._tables.values()
        )
        spare = self._num_blocks(SPARE_LEN) * len(self._tables)
        needed = self._num_blocks(len(seq.tokens) + 1) - len(hits)
        free = self._num_free - sum(block in self._idle for block in hits)
        return needed + promised + spare <= free

    # -- blocks ----------------------------------------------------------------------------------------------------

    @property
    def _num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    def _num_blocks(self, length: int) -> int:
        return -(-length // self._block_len)

    def _take(self) -> int:
        """Return a block for new content, evicting what was used least recently if none is empty."""
        if self._empty:
            block = self._empty.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            self._forget(block)
        self._refs[block] = 1
        return block

    def _cut(self, table: Table, num_blocks: int) -> None:
        """Give back the blocks of a table from the tail, until `num_blocks` are left."""
        if len(table.blocks) > num_blocks:
            table.place = ()
        while len(table.blocks) > num_blocks:
            block = table.blocks.pop()
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._digests[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def _register(self, block: int, digest: bytes) -> None:
        """Make a full block known, unless another one with the same content is."""
        if digest not in self._known:
            self._known[digest] = block
            self._digests[block] = digest

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None

    def _digest(self, seq: Sequence, index: int) -> bytes:
        """Return the digest of a sequence's tokens up to the end of a block."""
        chain = self._chains.setdefault(seq, [])
        while len(chain) <= index:
            first = len(chain) * self._block_len
            tokens = array("i", seq.tokens[first : first + self._block_len])
            key = chain[-1] if chain else blake2b(seq.owner.encode(), digest_size=16).digest()
            chain.append(blake2b(tokens.tobytes(), key=key, digest_size=16).digest())
        return chain[index]

    def _table_of(self, seq: Sequence) -> Table:
        assert isinstance(seq.kv, Table)
        assert seq.kv.owner is seq
        return seq.kv
