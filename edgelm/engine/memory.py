"""Memory: the counts of past answers, for each owner apart.

Owns which answers are in RAM, and that no owner's answers serve another. Knows nothing of drafts; the disk is
`answers`' business. Reading, counting and writing are put off until `work` is called.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque

from edgelm.engine.answers import AnswersFile
from edgelm.engine.ngrams import NgramCounts

MAX_TOKENS = 50_000  # in RAM, of all owners together: 15 to 26 MB, and half of it more while the older half goes


class Answers:
    """The answers of one owner: those in `counts`, and those that wait for it."""

    def __init__(self, most_tokens: int) -> None:
        self.counts = NgramCounts()
        self.num_tokens = 0  # of all that is kept
        self._most_tokens = most_tokens
        self._kept: deque[array[int]] = deque()
        self._waiting: deque[array[int]] = deque()
        self._counted = 0  # tokens of the first that waits
        self._next = self.counts  # what is filled; another than `counts` while those are rebuilt

    def add(self, tokens: array[int]) -> None:
        """Remember an answer; forget the older half if there are too many."""
        tokens = tokens[-self._most_tokens // 2 :]
        self._kept.append(tokens)
        self._waiting.append(tokens)
        self.num_tokens += len(tokens)
        if self.num_tokens > self._most_tokens:
            while self.num_tokens > self._most_tokens // 2:
                self.num_tokens -= len(self._kept.popleft())
            self._next = NgramCounts()
            self._waiting, self._counted = deque(self._kept), 0

    def work(self, num_tokens: int) -> bool:
        """Count so many tokens; True: more wait."""
        while num_tokens > 0 and self._waiting:
            first = self._waiting[0]
            stop = min(self._counted + num_tokens, len(first))
            self._next.add(first, self._counted, stop)
            num_tokens -= stop - self._counted
            self._counted = stop
            if stop == len(first):
                self._waiting.popleft()
                self._counted = 0
        if not self._waiting:
            self.counts = self._next
        return bool(self._waiting)


class Memory:
    """The answers of all owners. `file`: where they outlive the process."""

    def __init__(self, file: AnswersFile | None = None, most_tokens: int = MAX_TOKENS) -> None:
        self._file = file
        self._most_tokens = most_tokens
        self._owners: OrderedDict[str, Answers] = OrderedDict()  # least recently used first
        self._unread: list[str] = []
        self._unwritten: deque[tuple[str, list[int]]] = deque()

    def of(self, owner: str) -> Answers:
        """Return an owner's answers. What is on disk follows when `work` is called."""
        if self._file and self._owners and self._file.changed():
            self._owners.clear()  # the user cleared the memory, or another process shortened the file
            self._unread.clear()
        if owner not in self._owners:
            self._owners[owner] = Answers(self._most_tokens)
            if self._file:
                self._unread.append(owner)
        self._owners.move_to_end(owner)
        return self._owners[owner]

    def add(self, owner: str, tokens: list[int]) -> None:
        """Remember an answer."""
        if tokens:
            self._unwritten.append((owner, tokens))

    def work(self, num_tokens: int) -> bool:
        """Read, write or count a little; True: there is more to do."""
        if self._unread and self._file:
            owner = self._unread.pop()
            for tokens in self._file.read(owner):
                self._owners[owner].add(tokens)
            self._make_room(owner)
        elif self._unwritten:
            owner, answer = self._unwritten.popleft()
            answers = self.of(owner)
            if owner not in self._unread:  # else it is read back
                answers.add(array("i", answer))
            if self._file:
                self._file.append(owner, answer)
            self._make_room(owner)
        else:
            return any(answers.work(num_tokens) for answers in reversed(self._owners.values()))
        return True

    def close(self) -> None:
        """Write what is not written."""
        while self._unwritten:
            owner, answer = self._unwritten.popleft()
            if self._file:
                self._file.append(owner, answer)

    def _make_room(self, owner: str) -> None:
        """Drop the owners that were not used for longest; they are read again when they come back."""
        while sum(answers.num_tokens for answers in self._owners.values()) > self._most_tokens:
            oldest = next(iter(self._owners))
            if oldest == owner:
                break
            del self._owners[oldest]
            self._unread = [each for each in self._unread if each != oldest]
