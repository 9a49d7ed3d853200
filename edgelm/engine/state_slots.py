"""StateSlots: which slots hold the states of recurrent layers, of running sequences and of prefixes.

Owns integers. A state is that behind one position, so a prefix is reusable where its KV blocks are cached and the state
behind one of them is saved: a copy in a slot of its own. Saved are the states at save points of prompts, as for
llama.cpp (save_points.py), and of each answer the one behind its last full block. The one that a preempted sequence
goes on from stays until then. Knows nothing of tensors or blocks.

A state cannot go back, and a drafted token may be rejected. So a step moves a state over certain tokens only, and the
next step computes the accepted ones again: at most 15. It moves it no further than to the end of a block, so that the
next step can begin with its copy: then it lacks at most 15 more.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from edgelm.engine.core import CopyState, Sequence, StateSpan
from edgelm.engine.save_points import save_points


@dataclass(eq=False, slots=True)
class _State:
    """The state of one running sequence. `position` is where it is behind the steps that were planned."""

    slot: int
    position: int
    save_at: list[int] = field(default_factory=list)  # ends of blocks of the prompt, ascending
    saved: bytes | None = None  # the digest of the last one saved of the answer


class StateSlots:
    """The slots of `num_running` running sequences, and of `num_saved` prefixes."""

    def __init__(self, num_running: int, num_saved: int, block_len: int, max_rows: int) -> None:
        """Take `max_rows`: a chunk of so many tokens may leave the state behind any of them."""
        assert num_saved > 0
        self._sizes = num_running, num_saved
        self._max_rows = max_rows
        self._block_len = block_len
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        num_running, num_saved = self._sizes
        self._free = list(range(num_running))[::-1]
        self._empty = list(range(num_running, num_running + num_saved))[::-1]
        self._saved: dict[bytes, int] = {}  # slot by the digest of the prefix, least recently used first
        self._running: dict[Sequence, _State] = {}
        self._paused: WeakKeyDictionary[Sequence, bytes] = WeakKeyDictionary()  # the digests they go on from

    @property
    def saved(self) -> KeysView[bytes]:
        """The digests of the prefixes with a saved state."""
        return self._saved.keys()

    def num_usable(self, digests: list[bytes]) -> int:
        """Return how many blocks of a cached prefix can be reused: those before the last saved state."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._saved), 0)

    def begin(self, seq: Sequence, digests: list[bytes], num_used: int) -> list[CopyState]:
        """Give a sequence a slot. It reuses the first `num_used` blocks of the cached ones, which have these digests.

        Another prompt may go on otherwise behind the last cached block, so its state is saved on the way, too.
        """
        self._paused.pop(seq, None)
        position, cached = num_used * self._block_len, len(digests) * self._block_len
        points = save_points(position, seq.prompt_len, cached, [position])
        ends = {point // self._block_len * self._block_len for point in points}
        state = self._running[seq] = _State(self._free.pop(), position, sorted(end for end in ends if end > position))
        if not num_used:
            return []
        digest = digests[num_used - 1]
        saved = self._saved[digest] = self._saved.pop(digest)
        return [CopyState(saved, state.slot)]

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Return where a chunk has to end that could end at `end`."""
        return next((point for point in self._running[seq].save_at if seq.computed < point < end), end)

    def is_due(self, seq: Sequence) -> int:
        """Return the position of a sequence's state if it is to be saved now, else 0."""
        state = self._running[seq]
        position = state.position
        if position % self._block_len:
            return 0
        return position if position in state.save_at or position >= seq.prompt_len else 0

    def save(self, seq: Sequence, digest: bytes) -> list[CopyState]:
        """Save the state of a sequence, behind the prefix with this digest, if there is a slot.

        The last one of its answer makes way, or else the least recently used one that no preempted sequence needs.
        """
        state = self._running[seq]
        if digest in self._saved:
            self._saved[digest] = self._saved.pop(digest)
            return []
        if state.saved in self._saved and state.saved not in self._paused.values():
            self._empty.append(self._saved.pop(state.saved))
        if not self.has_room:
            return []
        slot = self.reserve(digest)
        if state.position not in state.save_at:
            state.saved = digest
        return [CopyState(state.slot, slot)]

    @property
    def has_room(self) -> bool:
        """Whether one more state can be saved: preempted sequences may need them all."""
        return bool(self._empty) or self._oldest is not None

    @property
    def _oldest(self) -> bytes | None:
        """The least recently used state that no preempted sequence needs."""
        needed = set(self._paused.values())
        return next((saved for saved in self._saved if saved not in needed), None)

    def reserve(self, digest: bytes) -> int:
        """Return a slot for the state behind a prefix. There is room; the least recently used state makes way."""
        if digest in self._saved:
            self._saved[digest] = self._saved.pop(digest)
            return self._saved[digest]
        if not self._empty:
            assert self._oldest
            self._empty.append(self._saved.pop(self._oldest))
        slot = self._saved[digest] = self._empty.pop()
        return slot

    def slot_of(self, digest: bytes) -> int:
        """Return the slot of a saved state."""
        return self._saved[digest]

    def lengths(self, digests: Iterable[bytes]) -> list[int]:
        """Return how many blocks of a prefix are before each of its saved states, ascending."""
        return [count for count, digest in enumerate(digests, 1) if digest in self._saved]

    def forget(self, digests: list[bytes]) -> None:
        """Forget the saved states of these prefixes."""
        self._empty += [self._saved.pop(digest) for digest in digests if digest in self._saved]

    def move(self, seq: Sequence, end: int, num_tokens: int, rows: int) -> StateSpan:
        """Return how a chunk that ends at `end` moves the state of a sequence, and note it.

        A chunk without sampled rows is part of a prompt, whose state is moved to the chunk's end.
        """
        state = self._running[seq]
        start, goal = state.position, end - max(rows - 1, 0)
        last = goal // self._block_len * self._block_len
        if rows and num_tokens <= self._max_rows and start < last:
            goal = last
        state.position = goal
        return StateSpan(state.slot, start, goal)

    def end(self, seq: Sequence) -> None:
        """Take back the slot of a sequence."""
        self._free.append(self._running.pop(seq).slot)

    def pause(self, seq: Sequence, digests: list[bytes]) -> None:
        """Keep the last saved state of these prefixes until a preempted sequence goes on from it."""
        if num_usable := self.num_usable(digests):
            self._paused[seq] = digests[num_usable - 1]
