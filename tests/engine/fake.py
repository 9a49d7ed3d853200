"""A fake executor whose output depends on every KV entry that it reads back.

An entry is a hash of (previous entry, token, position), and the model is a hash of all entries from the first to the
row's: one stale, missing or misplaced entry changes the sampled token. The memories are strict: calls that make
llama.cpp abort or compute nonsense are an AssertionError here. Shares no bookkeeping with the product.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import EngineError, RequestError, SnapshotError
from edgelm.engine.core import (
    LAST,
    NOT_A_TOKEN,
    Chunk,
    Copy,
    CopyState,
    Drop,
    ExecutorInfo,
    FinishReason,
    Load,
    Masks,
    OnSaving,
    Op,
    Sampled,
    SamplingParams,
    Save,
    Sequence,
    Step,
    Store,
    StoredPrefix,
    Trim,
)

THOUGHT_END = (3, 2)
ROOT = 17  # the entry before the first


def info(**changes: object) -> ExecutorInfo:
    """Return the facts of a roomy executor, with some of them changed."""
    facts: dict[str, object] = {
        "engine": "fake",
        "device": "none",
        "num_vocab": 40,
        "context": 256,
        "capacity": 1024,
        "max_tokens": 64,
        "max_rows": 16,
        "max_sequences": 4,
        "kv_bytes_per_token": 10,
    }
    return ExecutorInfo(**(facts | changes))  # type: ignore[arg-type]


def entry_of(previous: int, token: int, position: int) -> int:
    return hash((previous, token, position))


def choose(entries: Seq[int], params: SamplingParams, allowed: Seq[int]) -> int:
    """Return the token that follows `entries`: greedily, or by a draw that is keyed by seed, position and choice."""
    value = hash(tuple(entries))
    if not params.greedy:
        value = hash((value, params.seed, len(entries), params.choice))
    return allowed[value % len(allowed)]


def complete_alone(
    prompt: list[int], params: SamplingParams, info: ExecutorInfo, grammar: int | None = None, budget: int | None = None
) -> tuple[list[int], FinishReason]:
    """Return the answer to a request that runs alone: no cache, no batch, no draft.

    With a budget, the answer begins with a thought, which ends with THOUGHT_END.
    """
    entries: list[int] = []
    for position, token in enumerate(prompt):
        entries.append(entry_of(entries[-1] if entries else ROOT, token, position))
    answer: list[int] = []
    state = grammar
    while True:
        if state is not None and FakeMatcher.fails_in(state):
            return answer, "error"
        allowed = list(range(info.num_vocab)) if state is None else FakeMatcher.allowed_in(state, info.num_vocab)
        if budget is not None and len(answer) >= budget:
            allowed = [THOUGHT_END[len(answer) - budget]]
        token = choose(entries, params, allowed)
        answer.append(token)
        if budget is not None and tuple(answer[-2:]) == THOUGHT_END:
            budget = None
        state = None if state is None else hash((state, token))
        entries.append(entry_of(entries[-1], token, len(entries)))
        if token in params.stop_ids or (state is not None and FakeMatcher.ends_in(state)):
            return answer, "stop"
        if len(answer) == params.max_tokens:
            return answer, "length"
        if len(prompt) + len(answer) == info.context:
            return answer, "context"


class FakeMatcher:
    """A grammar in which a hash of all earlier tokens decides what is allowed, forced, the end, or an error."""

    unrestricted = False

    def __init__(self, seed: int, num_vocab: int, raises_at: int | None = None) -> None:
        self._state = seed
        self._num_vocab = num_vocab
        self._raises_at = raises_at
        self._num_accepted = 0
        self.error: str | None = None

    @staticmethod
    def allowed_in(state: int, num_vocab: int) -> list[int]:
        if hash((state, 1001)) % 2:
            return [state % num_vocab]
        return [t for t in range(num_vocab) if t == state % num_vocab or hash((state, t)) % 3 == 0]

    @staticmethod
    def ends_in(state: int) -> bool:
        return hash((state, 1002)) % 60 == 0

    @staticmethod
    def fails_in(state: int) -> bool:
        return hash((state, 1003)) % 150 == 0

    @property
    def done(self) -> bool:
        return self._num_accepted > 0 and self.ends_in(self._state)

    def allowed(self, draft: list[int]) -> int:
        state = self._state
        for index, token in enumerate(draft):
            if token not in self.allowed_in(state, self._num_vocab):
                return index
            state = hash((state, token))
        return len(draft)

    def forced(self, most: int) -> list[int]:
        state, forced = self._state, list[int]()
        while len(forced) < most and len(allowed := self.allowed_in(state, self._num_vocab)) == 1:
            forced += allowed
            state = hash((state, allowed[0]))
            if self.ends_in(state):
                break
        return forced

    def fill(self, draft: list[int], rows: Masks) -> None:
        assert len(rows) == len(draft) + 1
        state = self._state
        for index, row in enumerate(rows):
            if self.fails_in(state):
                rows[index:] = 0
                if index == 0:
                    self.error = "too complex"
                return
            allowed = self.allowed_in(state, self._num_vocab)
            words = [0] * len(row)
            for token in allowed:
                words[token // 32] |= 1 << token % 32
            row.view(np.uint32)[:] = words
            if index == len(draft) or draft[index] not in allowed:
                return
            state = hash((state, draft[index]))
        raise AssertionError

    def accept(self, token: int) -> None:
        assert self.error is None
        assert token in self.allowed_in(self._state, self._num_vocab)
        if self._num_accepted == self._raises_at:
            raise InjectedError
        self._num_accepted += 1
        self._state = hash((self._state, token))


class SimpleDrafter:
    """The base of the drafters in tests: it prepares nothing, defers nothing and keeps nothing."""

    def begin(self, seq: Sequence) -> None: ...

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None: ...

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        return math.inf  # no step runs ahead, so `propose` is called for each

    def end(self, seq: Sequence) -> None: ...

    def work(self, seconds: float) -> bool:
        return False

    def close(self) -> None: ...


class InjectedError(Exception):
    """A failure that a test injected, and that is not an EdgeLMError."""


@dataclass(frozen=True)
class Fault:
    """A step fails in the middle: after `done` ops, after `done` tokens, when it samples, or when it is read."""

    where: Literal["ops", "chunks", "sample", "read"]
    done: int = 0
    error: type[Exception] = EngineError

    def exception(self) -> Exception:
        return self.error("a fault was injected")


class Memory(Protocol):
    def apply(self, op: Op, lenient: bool) -> None: ...
    def check_step(self, step: Step) -> None: ...
    def write(self, chunk: Chunk, position: int, token: int) -> None: ...
    def read(self, chunk: Chunk) -> list[int]: ...


@dataclass(eq=False, slots=True)
class _Cell:
    entry: int
    holders: set[int]  # of slots


@dataclass(eq=False, slots=True)
class FakeFiles:
    """A disk that outlives the engine. Damage is noticed when a file is read."""

    found: tuple[StoredPrefix, ...] = ()
    entries: dict[str, list[int]] = field(default_factory=dict)
    spoiled: set[str] = field(default_factory=set)
    num_fetched: int = 0

    def write(self, op: Store, entries: list[int]) -> None:
        name = f"{op.cache_namespace}/{hash(op.tokens.tobytes())}/{op.shared}"
        if name not in self.entries:
            assert len(entries) == len(op.tokens)
            self.entries[name] = entries
            self.found = (*self.found, StoredPrefix(name, op.tokens, op.cache_namespace, op.shared))

    def delete(self, name: str) -> None:
        self.entries.pop(name, None)
        self.found = tuple(file for file in self.found if file.name != name)


class FakeSnapshots:
    """The `Snapshots` of a memory. `refused` are the numbers of the saves for which there is no room."""

    def __init__(self, info: ExecutorInfo, files: FakeFiles | None, refused: frozenset[int]) -> None:
        self._info = info
        self._files = files
        self._refused = refused
        self._num_saved = 0
        self._fetched: set[int] = set()
        self.keeps_files = files is not None
        self.snapshots: dict[int, list[int]] = {}
        self.read_steps = 0  # how many steps it takes to read a file
        self.num_waits = 0  # for a file that was not read yet
        self._num_asked: Counter[str] = Counter()  # how often for each file

    def save(self, key: int, entries: list[int]) -> None:
        assert key not in self.snapshots
        assert entries
        self._num_saved += 1
        if self._num_saved not in self._refused:
            self.snapshots[key] = entries

    def load(self, key: int) -> list[int]:
        if key not in self.snapshots:
            raise SnapshotError("it was not saved")
        return self.snapshots[key]

    def drop(self, key: int, lenient: bool) -> None:
        assert lenient or self._refused or key in self.snapshots
        self.snapshots.pop(key, None)
        self._fetched.discard(key)

    def store(self, op: Store) -> None:
        assert self._files is not None
        if op.key in self.snapshots:
            self._files.write(op, self.snapshots[op.key])

    def nbytes(self, key: int) -> int | None:
        return len(self.snapshots[key]) * self._info.kv_bytes_per_token if key in self.snapshots else None

    def files(self) -> tuple[StoredPrefix, ...]:
        return self._files.found if self._files else ()

    def prefetch(self, name: str) -> bool:
        assert name in {file.name for file in self.files()}
        self._num_asked[name] += 1
        is_read = self._num_asked[name] > self.read_steps
        self.num_waits += not is_read
        return is_read

    def drop_prefetched(self) -> None:
        self._num_asked.clear()

    def fetch(self, name: str, key: int) -> bool:
        assert self._files
        assert key not in self.snapshots
        assert name in {file.name for file in self._files.found}
        if name in self._files.spoiled:
            self._files.delete(name)
            return False
        self.snapshots[key] = self._files.entries[name]
        self._fetched.add(key)
        self._files.num_fetched += 1
        return True

    def flush(self, on_saving: OnSaving) -> None: ...


class SlotMemory(FakeSnapshots):
    """llama.cpp's unified cache: a cell carries the set of slots that hold it, and is free when the set is empty."""

    def __init__(
        self,
        info: ExecutorInfo,
        snapshot_bytes: int,
        files: FakeFiles | None = None,
        refused: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(info, files, refused)
        self._snapshot_bytes = snapshot_bytes
        self.slots: list[list[_Cell]] = [[] for _ in range(info.max_sequences)]
        self.num_used = 0
        self._starts = [0] * info.max_sequences  # where the last chunk of each slot began
        self._cut = set[int]()  # slots whose state went back since their last chunk
        self._moved = set[int]()  # slots beside which others ran since then: only drafts of one length run last

    def apply(self, op: Op, lenient: bool) -> None:
        match op:
            case Copy(src, dst, length):
                assert self._info.can_copy
                assert src != dst
                assert not self.slots[dst]
                assert 0 < length <= len(self.slots[src])
                assert (self._info.can_trim and self._info.keeps_all) or length == len(self.slots[src])
                for cell in self.slots[src][:length]:
                    cell.holders.add(dst)
                    self.slots[dst].append(cell)
                self._starts[dst] = length
            case Trim(slot, length):
                assert 0 <= length <= len(self.slots[slot])
                cut = len(self.slots[slot]) - length
                if not self._info.can_trim and length and cut:
                    assert cut <= self._info.rollback_len
                    assert length > self._starts[slot], "a state before the last chunk is lost"
                    assert slot not in self._cut, "a state goes back once"
                    assert slot not in self._moved, "the states before the last one are lost where others run"
                    self._cut.add(slot)
                assert self._info.keeps_all or length == 0 or length >= self._starts[slot], "older positions are lost"
                while len(self.slots[slot]) > length:
                    cell = self.slots[slot].pop()
                    cell.holders.remove(slot)
                    self.num_used -= not cell.holders
            case Save(int(slot), key):
                self._save(slot, key)
            case Load(key, int(slot)):
                assert not self.slots[slot]
                for entry in self.load(key):
                    self._append(slot, entry)
                self._starts[slot] = len(self.slots[slot])
            case Drop(key):
                self.drop(key, lenient)
            case Store():
                self.store(op)
            case _:
                raise AssertionError(op)

    def _save(self, slot: int, key: int) -> None:
        self.save(key, [cell.entry for cell in self.slots[slot]])
        num_tokens = sum(len(entries) for key, entries in self.snapshots.items() if key not in self._fetched)
        assert num_tokens * self._info.kv_bytes_per_token <= self._snapshot_bytes

    def check_step(self, step: Step) -> None:
        slots = [chunk.kv for chunk in step.chunks]
        assert len(set(slots)) == len(slots)
        assert not self._fetched, "what is fetched is loaded and dropped in one step"
        if not self._info.can_trim and step.chunks:  # ops alone move no sequence
            assert len({chunk.rows for chunk in step.chunks if chunk.rows > 1}) <= 1, "drafts are of one length"
            last = [chunk.kv for chunk in step.chunks if chunk.rows > 1 or len(slots) == 1]
            self._moved = set(range(len(self.slots))).difference(slot for slot in last if isinstance(slot, int))

    def write(self, chunk: Chunk, position: int, token: int) -> None:
        assert isinstance(chunk.kv, int)
        slot = self.slots[chunk.kv]
        assert len(slot) == position
        self._starts[chunk.kv] = chunk.start
        self._cut.discard(chunk.kv)
        self._append(chunk.kv, entry_of(slot[-1].entry if slot else ROOT, token, position))

    def read(self, chunk: Chunk) -> list[int]:
        assert isinstance(chunk.kv, int)
        return [cell.entry for cell in self.slots[chunk.kv]]

    def _append(self, slot: int, entry: int) -> None:
        self.slots[slot].append(_Cell(entry, {slot}))
        self.num_used += 1
        assert self.num_used <= self._info.capacity


class PagedMemory(FakeSnapshots):
    """Blocks that are read through tables; positions that were never written hold poison."""

    def __init__(
        self, info: ExecutorInfo, block_len: int, files: FakeFiles | None = None, refused: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(info, files, refused)
        self._block_len = block_len
        self._poison = itertools.count(-1, -1)
        self._blocks = [[0] * block_len for _ in range(info.capacity // block_len)]
        for block in range(len(self._blocks)):
            self.poison(block)
        self._states: dict[int, tuple[int, int]] = {}  # by slot: a length, and the entry before it

    def poison(self, block: int, first: int = 0) -> None:
        """Poison a block from an offset on."""
        for offset in range(first, self._block_len):
            self._blocks[block][offset] = next(self._poison)

    def apply(self, op: Op, lenient: bool) -> None:
        match op:
            case Save(tuple(blocks), key, state):
                assert len(set(blocks)) == len(blocks)
                assert (state is not None) == bool(self._info.num_states)
                entries = [entry for block in blocks for entry in self._blocks[block]]
                if state is not None:
                    assert self._states[state] == (len(entries), entries[-1]), "it is behind the last block"
                self.save(key, entries)
            case Load(key, tuple(blocks), first, state):
                assert len(set(blocks)) == len(blocks) > 0
                entries = self.load(key)
                if state is not None:
                    assert len(entries) == (first + len(blocks)) * self._block_len
                    self._states[state] = len(entries), entries[-1]
                entries = entries[first * self._block_len :]
                assert len(entries) >= len(blocks) * self._block_len
                for place, block in enumerate(blocks):
                    self._blocks[block] = entries[place * self._block_len : (place + 1) * self._block_len]
            case Drop(key):
                self.drop(key, lenient)
            case Store():
                self.store(op)
            case CopyState(src, dst):
                assert src != dst
                self._states[dst] = self._states[src]
            case _:
                raise AssertionError(op)

    def check_step(self, step: Step) -> None:
        spans = [chunk.state for chunk in step.chunks if chunk.state]
        assert len(spans) == (len(step.chunks) if self._info.num_states else 0)
        assert len({span.slot for span in spans}) == len(spans)
        for chunk in step.chunks:
            if span := chunk.state:
                assert 0 <= span.start <= chunk.start
                assert span.start < span.goal <= chunk.end
                if span.start < chunk.start:  # tokens are computed again, from their kept inputs
                    assert len(chunk.tokens) <= self._info.max_draft + 1
                    assert chunk.end - span.start < 3 * (self._info.max_draft + 1)
                if span.start:
                    assert self._states[span.slot] == (span.start, self._at(self._table(chunk), span.start - 1))
        assert not self.snapshots, "a snapshot is only on its way to a file, or from one"
        tables = [self._table(chunk) for chunk in step.chunks]
        for chunk, table in zip(step.chunks, tables, strict=True):
            assert len(set(table)) == len(table)
            assert len(table) * self._block_len >= chunk.end
            written = set(table[chunk.start // self._block_len :])
            assert sum(bool(written.intersection(other)) for other in tables) == 1, "a block is written and shared"

    def write(self, chunk: Chunk, position: int, token: int) -> None:
        table = self._table(chunk)
        previous = self._at(table, position - 1) if position else ROOT
        block, offset = divmod(position, self._block_len)
        self._blocks[table[block]][offset] = entry_of(previous, token, position)
        if chunk.state and position + 1 == chunk.end:
            self._states[chunk.state.slot] = chunk.state.goal, self._at(table, chunk.state.goal - 1)

    def read(self, chunk: Chunk) -> list[int]:
        return [entry for block in self._table(chunk) for entry in self._blocks[block]][: chunk.end]

    def _at(self, table: tuple[int, ...], position: int) -> int:
        block, offset = divmod(position, self._block_len)
        return self._blocks[table[block]][offset]

    @staticmethod
    def _table(chunk: Chunk) -> tuple[int, ...]:
        assert isinstance(chunk.kv, tuple)
        return chunk.kv


@dataclass(eq=False)
class FakeExecutor:
    """An `Executor` over a fake memory. `faults` are by number of step, `spoiled` has an answer length by sequence."""

    info: ExecutorInfo
    memory: Memory
    faults: dict[int, Fault] = field(default_factory=dict)
    spoiled: dict[int, int] = field(default_factory=dict)
    all_rows: bool = False  # whether rows after a rejected draft token are sampled too
    num_steps: int = 0
    num_computed: int = 0  # tokens
    closed: bool = False
    lenient: bool = False  # after a failed step there may be more or fewer snapshots than the bookkeeper expects

    def __post_init__(self) -> None:
        self._fault: Fault | None = None
        self._step: Step | None = None
        self._last: dict[int, int] = {}  # by sequence: the token of the last step, if it sampled one row
        self._unread: list[FakePendingSamples] = []
        self._entries: list[list[int]] = []  # read back by each chunk

    def forward(self, step: Step) -> None:
        assert not self.closed
        self._check(step)
        if not any(LAST in chunk.tokens for chunk in step.chunks):
            self._unread.clear()  # the engine gave these up
        self._fault = fault = self.faults.get(self.num_steps)
        self.num_steps += 1
        for done, op in enumerate(step.ops):
            if fault and fault.where == "ops" and done == fault.done:
                self._fail(fault)
            self.memory.apply(op, lenient=self.lenient)
        self.lenient = False
        self.memory.check_step(step)
        done = 0
        for chunk in step.chunks:
            tokens = [max(self._last[chunk.seq.id], 0)] if chunk.tokens == [LAST] else chunk.tokens
            for position, token in enumerate(tokens, chunk.start):
                if fault and fault.where == "chunks" and done == fault.done:
                    self._fail(fault)
                self.memory.write(chunk, position, token)
                done += 1
        self.num_computed += done
        self._step, self._entries = step, [self.memory.read(chunk) for chunk in step.chunks]
        if fault and fault.where in ("ops", "chunks"):
            self._fail(fault)  # there were fewer ops or tokens

    def sample(self, step: Step, masks: Masks | None) -> FakePendingSamples:
        assert step is self._step
        if self._fault and self._fault.where == "sample":
            self._fail(self._fault)
        assert masks is None or len(masks) == step.num_rows
        sampled, first = [], 0
        for chunk, entries in zip(step.chunks, self._entries, strict=True):
            rows = None if masks is None else masks[first : first + chunk.rows]
            sampled.append(self._sample_chunk(chunk, entries, rows))
            first += chunk.rows
        self._last = {
            chunk.seq.id: rows[0].id for chunk, rows in zip(step.chunks, sampled, strict=True) if chunk.rows == 1
        }
        assert len(self._unread) <= self.info.runs_ahead, "a step is launched while two others are unread"
        samples = FakePendingSamples(self, sampled, self._fault)
        self._unread.append(samples)
        return samples

    def read(self, samples: FakePendingSamples) -> None:
        assert samples in self._unread, "it was given up or read before"
        del self._unread[: self._unread.index(samples) + 1]
        if samples.fault:
            self._fail(samples.fault)

    def logits(self, step: Step) -> NDArray[np.float32]:
        raise RequestError("the fake has no logits")

    def close(self) -> None:
        self.closed = True

    def _sample_chunk(self, chunk: Chunk, entries: list[int], masks: Masks | None) -> list[Sampled]:
        taken: list[Sampled] = []
        for row in range(chunk.rows):
            allowed: Seq[int] = range(self.info.num_vocab)
            if masks is not None:
                bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
                allowed = np.flatnonzero(bits[: self.info.num_vocab]).tolist()
            token = NOT_A_TOKEN
            if allowed:
                token = choose(entries[: chunk.end - chunk.rows + row + 1], chunk.seq.params, allowed)
            if self.spoiled.get(chunk.seq.id) == chunk.end - chunk.rows + 1 + row - chunk.seq.prompt_len:
                token = NOT_A_TOKEN
            taken.append(Sampled(token))
            if not self.all_rows and (row + 1 == chunk.rows or token != chunk.draft[row]):
                break
        return taken

    def _fail(self, fault: Fault) -> NoReturn:
        self.lenient, self._fault = True, None
        raise fault.exception()

    def _check(self, step: Step) -> None:
        assert step.chunks or step.ops
        assert len(step.chunks) <= self.info.max_sequences
        assert sum(len(chunk.tokens) for chunk in step.chunks if not chunk.is_picture) <= self.info.max_tokens
        assert step.num_rows <= self.info.max_rows
        for chunk in step.chunks:
            assert chunk.tokens
            assert 0 <= chunk.rows <= len(chunk.tokens)
            assert 0 <= chunk.start < chunk.end <= self.info.context
            if LAST in chunk.tokens:
                assert self.info.runs_ahead
                assert (chunk.tokens, chunk.rows) == ([LAST], 1)
                assert self._unread, "the host knows the last token"
            elif chunk.is_picture:
                span = chunk.seq.picture_at(chunk.start)
                assert span
                assert chunk.end <= span.end
                assert chunk.rows == 0
                assert not span.whole or len(chunk.tokens) == span.num_tokens
            else:
                assert 0 <= min(chunk.tokens) <= max(chunk.tokens) < self.info.num_vocab


@dataclass(eq=False, slots=True)
class FakePendingSamples:
    """Samples on the fake device, hidden until they are read."""

    executor: FakeExecutor
    rows: list[list[Sampled]]
    fault: Fault | None

    def read(self) -> list[list[Sampled]]:
        self.executor.read(self)
        return self.rows
