"""FollowedHeads: what is kept of each sequence for heads that predict the token after the next one, in any engine.

Owns the hidden states of the model that the heads read, and which positions the heads have computed. A head computes,
at position p, what follows token p, from that token and the hidden state of position p - 1:

    model      h0    h1    h2    h3        hidden states, of tokens that the model has computed
                 ↘     ↘     ↘     ↘
    heads    t0   t1    t2    t3    t4     t4 is sampled; then come t5 by h3, t6 by the head's own state, …

Only the last HEADS_WINDOW positions are computed: the heads see less of a long prompt, but cost next to nothing there.
Knows nothing of what a draft is worth.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from edgelm.engine.core import NOT_A_TOKEN, Chunk

HEADS_WINDOW = 32  # positions that heads see when they begin, and after a pause: 128 took as long as two plain steps
NOTHING = NOT_A_TOKEN, 0.0
Row = TypeVar("Row")  # a hidden state of one position


class Followed(Generic[Row]):
    """What is kept of one sequence."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.first = 0  # the position of the first hidden state
        self.hidden: list[Row] = []
        self.begin = 0  # the first position that the heads have computed
        self.length = 0  # behind the last one that they have computed by the model's hidden states; 0: none
        self.num_ahead = 0  # positions behind these, by the heads' own
        self.state: Row | None = None  # the heads' own, of the last position

    @property
    def end(self) -> int:
        return self.first + len(self.hidden)

    def take(self, position: int, hidden: Sequence[Row]) -> None:
        """Take the hidden states from a position on, in place of older ones."""
        if self.first <= position <= self.end:
            del self.hidden[position - self.first :]
        else:
            self.first, self.hidden = position, []
        self.hidden += hidden
        if (excess := len(self.hidden) - HEADS_WINDOW) > 0:
            del self.hidden[:excess]
            self.first += excess


class FollowedHeads(Generic[Row]):
    """The `Heads` of an executor, for so many sequences, without the computation.

    They begin anew behind `max_len` positions.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self._followed: dict[int, Followed[Row]] = {}  # by the id of the sequence
        self._free_slots = list(range(num_slots))
        self._max_len = max_len

    def wanted(self, chunk: Chunk) -> int:
        """Return how many hidden states before the sampled rows of a chunk are read: those of the end of a prompt."""
        if not self.follows(chunk):
            return 0
        first = max(chunk.start, len(chunk.seq.tokens) - HEADS_WINDOW)
        return max(chunk.end - chunk.rows - first, 0)

    def follows(self, chunk: Chunk) -> bool:
        return chunk.seq.id in self._followed

    def keep(self, chunk: Chunk, hidden: Sequence[Row]) -> None:
        """Keep the hidden states of the last rows of a followed chunk that the model has run."""
        if hidden:
            self._followed[chunk.seq.id].take(chunk.end - len(hidden), hidden)

    def begin(self, seq_id: int) -> None:
        if self._free_slots and seq_id not in self._followed:
            self._followed[seq_id] = Followed(self._free_slots.pop())

    def first(self, seq_id: int, tokens: list[int]) -> tuple[int, float]:
        followed = self._followed.get(seq_id)
        last = len(tokens) - 1
        if followed is None or followed.end < last:
            return NOTHING
        start = min(followed.length, last)
        if start <= followed.first or last - followed.begin >= self._max_len:
            self._trim(followed, 0)  # they begin, or states before the window are needed
            start = followed.begin = followed.first + 1
        elif followed.length + followed.num_ahead > start:
            self._trim(followed, start)
        if start > last:
            return NOTHING
        hidden = followed.hidden[start - 1 - followed.first : last - followed.first]
        result = self._run(followed, tokens[start:], start, hidden)
        followed.length = len(tokens) if result != NOTHING else 0
        return result

    def next(self, seq_id: int, token: int) -> tuple[int, float]:
        followed = self._followed[seq_id]
        assert followed.state is not None
        result = self._run(followed, [token], followed.length + followed.num_ahead, [followed.state])
        followed.num_ahead += result != NOTHING
        return result

    def end(self, seq_id: int) -> None:
        if followed := self._followed.pop(seq_id, None):
            self._trim(followed, 0)
            self._free_slots.append(followed.slot)

    def _trim(self, followed: Followed[Row], length: int) -> None:
        """Forget what the heads have computed from a position on."""
        self._forget(followed, length)
        followed.length, followed.num_ahead = length, 0

    @abstractmethod
    def _forget(self, followed: Followed[Row], length: int) -> None:
        """Cut the heads' cache of a sequence."""

    @abstractmethod
    def _run(self, followed: Followed[Row], tokens: list[int], start: int, hidden: Sequence[Row]) -> tuple[int, float]:
        """Compute positions from `start` on, and set `state`.

        Return the token behind the last one, and its probability, or NOTHING where there is no room.
        """
