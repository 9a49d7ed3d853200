"""GuardedDrafter: a drafter that is stopped where the clock shows that its drafts lose time.

Owns the comparison of what steps with drafts took with what steps without take, and the user's limit. Knows nothing
of how drafts are made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from edgelm.core import Drafter, Sequence
from edgelm.engine.clock import StepClock

LOSS = 2.0  # plain steps: so much may be lost before drafting stops
LEAST_LOSS = 0.25  # where drafts lost in one message after the other; each of them that is stopped halves it
CREDIT = 2.0  # plain steps: so much of what was won counts against later losses
PAUSE = 64  # tokens without drafts at first; twice as many each time that they lose again
FREE = 0.01  # plain steps: what asking for a draft may take


class _Account:
    """What drafting brought one message, in plain steps."""

    __slots__ = ("balance", "loss", "pause", "resume_at")

    def __init__(self, loss: float) -> None:
        self.balance = 0.0
        self.loss = loss
        self.pause = PAUSE
        self.resume_at = 0  # length of the sequence from which on it drafts

    def enter(self, seq: Sequence, won: float) -> None:
        """Add to the balance; stop drafting for a while where it is too low."""
        self.balance = min(self.balance + won, CREDIT)
        if self.balance < -self.loss:
            self.balance = 0.0
            self.resume_at = len(seq.tokens) + self.pause
            self.pause *= 2


class GuardedDrafter:
    """A `Drafter` around another. Each message starts with a clean account; `most` bounds a draft's length."""

    def __init__(self, drafter: Drafter, clock: StepClock, most: int | None = None) -> None:
        self._drafter = drafter
        self._clock = clock
        self._most = most
        self._accounts: WeakKeyDictionary[Sequence, _Account] = WeakKeyDictionary()
        self._loss = LOSS  # of the next message

    def begin(self, seq: Sequence) -> None:
        self._accounts[seq] = _Account(self._loss)
        self._drafter.begin(seq)

    def propose(self, seq: Sequence, marginal_cost: Seq[float]) -> list[int]:
        account = self._accounts[seq]
        if len(seq.tokens) < account.resume_at or self._clock.plain_due:
            return []
        began = time.perf_counter()
        draft = self._drafter.propose(seq, marginal_cost[: self._most])
        plain_s = self._clock.plain_s()
        if plain_s:
            account.enter(seq, min(FREE - (time.perf_counter() - began) / plain_s, 0.0))
        return draft

    def stake(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        """Return what the drafter says, or nothing where it will not be asked. The asking is beside the device's work.

        A step without drafts that is due is the one under way.
        """
        if len(seq.tokens) + 1 < self._accounts[seq].resume_at:
            return 0.0
        return self._drafter.stake(seq, marginal_cost[: self._most])

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._drafter.observe(seq, drafted, accepted)
        step = self._clock.last
        if step is None or step.rows <= step.sequences:
            return
        if not step.plain_s:
            if 2 * accepted < drafted:
                self._clock.plain_due = True  # before more of such drafts are made
            return
        share = drafted / (step.rows - step.sequences)
        won = accepted / step.sequences - share * (step.seconds / step.plain_s - 1)
        self._accounts[seq].enter(seq, max(won, -LOSS))  # one that hangs is no fault of its draft

    def end(self, seq: Sequence) -> None:
        account = self._accounts.pop(seq, None)
        if account:
            stopped = account.resume_at > 0
            self._loss = max(account.loss / 2, LEAST_LOSS) if stopped else LOSS
        self._drafter.end(seq)

    def work(self, seconds: float) -> bool:
        return self._drafter.work(seconds)

    def close(self) -> None:
        self._drafter.close()
