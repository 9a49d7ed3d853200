"""AdmissionQueue: the sequences that wait, and which one is admitted next.

Owns the order of admission. Sequences that ran before come first. Then there are three kinds: completions in an editor
go before short answers, and these before long ones, but at most TURNS in a row while one of a later kind waits. Within
each kind, clients take turns by tokens: start-time fair queuing (Goyal, Vin, Cheng, SIGCOMM 1996), where a client is
charged for the prompt tokens that were not cached and for its answers. So a client's first request waits for at most
one request of the same kind of every other client, however many they sent; and behind any number of long requests, a
short one waits for at most N = 1 of them. Knows nothing of time, memory or steps.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from edgelm.engine.core import Sequence

SHORT_ANSWER = 64  # tokens; a request for at most this many is interactive
TURNS = 4  # requests that are admitted in a row while one of a later kind waits
# Tokens charged at admission; more is charged as it is generated, less is given back as far as the clock allows.
EXPECTED_ANSWER = 64
CLOCK_SHARE = 512  # the clock moves by this part of each admission, so that new clients cannot pass for ever
MAX_CLIENTS = 1024  # remembered without an open request


class _Kind(IntEnum):
    """The kinds of requests, in the order of their admission."""

    EDITOR = 0
    SHORT = 1
    LONG = 2


def is_interactive(seq: Sequence) -> bool:
    """Tell whether somebody waits for a short answer, as for a completion in an editor or the title of a chat."""
    return _kind_of(seq) != _Kind.LONG


@dataclass(slots=True)
class _Lane:
    """The waiting requests of one client, oldest first. Only the first one has a start tag."""

    waiting: deque[Sequence] = field(default_factory=deque)
    start: int = 0  # the tokens that the client had received when this one became the first

    @property
    def key(self) -> tuple[int, int]:
        return self.start, self.waiting[0].id


class _FairQueue:
    """Requests of one kind, in a lane for each client."""

    def __init__(self) -> None:
        self.lanes: dict[str, _Lane] = {}
        self._received: dict[str, int] = {}  # tokens by client; a client that comes now starts at the clock
        self._clock = 0

    def first(self) -> Sequence | None:
        """Return the oldest request of the client that has received least; None: none waits."""
        return min(self.lanes.values(), key=lambda lane: lane.key).waiting[0] if self.lanes else None

    def add(self, seq: Sequence) -> None:
        lane = self.lanes.setdefault(seq.client, _Lane())
        lane.waiting.append(seq)
        if len(lane.waiting) == 1:
            self._set_start(lane)

    def admit(self, seq: Sequence, cost: int) -> None:
        """Remove the first sequence, and charge its client."""
        start = self.lanes[seq.client].start
        self._received[seq.client] += cost
        self._clock = max(self._clock, start) + 1 + cost // CLOCK_SHARE
        self.remove(seq)

    def charge(self, client: str, tokens: int) -> None:
        """Charge a client for more tokens, or give some back."""
        self._received[client] += tokens

    def remove(self, seq: Sequence) -> None:
        lane = self.lanes[seq.client]
        was_first = lane.waiting[0] is seq
        lane.waiting.remove(seq)
        if not lane.waiting:
            del self.lanes[seq.client]
        elif was_first:
            self._set_start(lane)

    def forget_clients(self, but: Counter[str]) -> None:
        """Forget what clients received, except those in `but`."""
        if len(self._received) > len(but) + MAX_CLIENTS or not but:
            self._received = {client: self._received[client] for client in but if client in self._received}
        if not but:
            self._clock = 0

    def _set_start(self, lane: _Lane) -> None:
        client = lane.waiting[0].client
        lane.start = self._received[client] = max(self._received.get(client, 0), self._clock)


class AdmissionQueue:
    """The waiting sequences of a scheduler. The head changes only when a sequence comes, is admitted, or leaves."""

    def __init__(self) -> None:
        self._returned: list[Sequence] = []  # ran before; in the order of their first admission
        self._queues = {kind: _FairQueue() for kind in _Kind}
        self._charged: dict[Sequence, int] = {}  # tokens, of those that were admitted and have not ended
        self._open: Counter[str] = Counter()  # sequences by client, waiting and running
        self._num_admitted = 0
        self._num_passed = 0  # sequences admitted in a row while one of a later kind waited

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy: those that ran before, then the others by age."""
        lanes = [lane for queue in self._queues.values() for lane in queue.lanes.values()]
        return iter([*self._returned, *sorted((seq for lane in lanes for seq in lane.waiting), key=lambda s: s.id)])

    def __bool__(self) -> bool:
        return bool(self._returned) or any(queue.lanes for queue in self._queues.values())

    def __len__(self) -> int:
        return sum(self._open.values()) - len(self._charged) + len(self._returned)

    def head(self, *, no_long: bool = False) -> Sequence | None:
        """Return the sequence to admit next; None: there is none. `no_long` passes over long ones that never ran."""
        if self._returned:
            return self._returned[0]
        firsts = self._first_of_each_kind(no_long)
        if len(firsts) > 1 and self._num_passed >= TURNS:
            return min(firsts[1:], key=lambda seq: seq.id)
        return firsts[0] if firsts else None

    def editor_head(self) -> Sequence | None:
        """Return the next request of an editor, which may overtake those that ran before; None: others have a turn."""
        head = self._queues[_Kind.EDITOR].first()
        if head and self._num_passed >= TURNS and (self._returned or len(self._first_of_each_kind()) > 1):
            return None
        return head

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. A later sequence has a greater id."""
        self._open[seq.client] += 1
        self._queue(seq).add(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queue a sequence that was admitted before: the one that was admitted first is the head."""
        bisect.insort(self._returned, seq, key=turn_of)

    def admit(self, seq: Sequence) -> None:
        """Remove the head, or the editor's. Its `cached` is known; at its first admission, it is given its `turn`."""
        if seq.turn is not None:
            self._returned.remove(seq)
            self._num_passed = 0
            return
        firsts = self._first_of_each_kind()
        passes = seq is firsts[0] and bool(len(firsts) > 1 or self._returned)
        self._num_passed = self._num_passed + 1 if passes else 0
        seq.turn, self._num_admitted = self._num_admitted, self._num_admitted + 1
        self._charged[seq] = _cost(seq) + min(seq.params.max_tokens or EXPECTED_ANSWER, EXPECTED_ANSWER)
        self._queue(seq).admit(seq, self._charged[seq])

    def charge(self, seq: Sequence) -> None:
        """Charge the client of a running sequence for the part of its answer that was not expected."""
        beyond = _cost(seq) - self._charged[seq]
        if beyond > 0:
            self._charged[seq] += beyond
            self._queue(seq).charge(seq.client, beyond)

    def end(self, seq: Sequence) -> None:
        """Forget a sequence that ended, waiting or running; its client gets back what was charged and not used."""
        if seq.turn is None:
            self._queue(seq).remove(seq)
        else:
            if seq in self._returned:
                self._returned.remove(seq)
            self._queue(seq).charge(seq.client, _cost(seq) - self._charged.pop(seq))
        self._open[seq.client] -= 1
        if not self._open[seq.client]:
            del self._open[seq.client]
        for queue in self._queues.values():
            queue.forget_clients(but=self._open)

    def _first_of_each_kind(self, no_long: bool = False) -> list[Sequence]:
        """Return the next sequence of each kind that has any, in the order of the kinds."""
        kinds = [kind for kind in _Kind if not (no_long and kind == _Kind.LONG)]
        return [first for kind in kinds if (first := self._queues[kind].first())]

    def _queue(self, seq: Sequence) -> _FairQueue:
        return self._queues[_kind_of(seq)]


def turn_of(seq: Sequence) -> int:
    """Return the number of a sequence's first admission."""
    assert seq.turn is not None
    return seq.turn


def _kind_of(seq: Sequence) -> _Kind:
    if seq.interactive:
        return _Kind.EDITOR
    return _Kind.SHORT if (seq.params.max_tokens or SHORT_ANSWER + 1) <= SHORT_ANSWER else _Kind.LONG


def _cost(seq: Sequence) -> int:
    """Return the tokens that a sequence has cost: of its prompt those that were not cached, and its answer."""
    return seq.prompt_len - (seq.cached or 0) + seq.completion_len
