"""Drafters around other drafters: ThrottledDrafter stops one whose drafts lose time, ChainDrafter joins several.

Owns the comparison of steps with and without drafts, the user's limit, and the order of drafters. Knows nothing of how
drafts are made.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from weakref import WeakKeyDictionary

from edgelm.engine.clock import StepClock
from edgelm.engine.core import Drafter, Sequence

MAX_LOSS = 2.0  # plain steps that a request, or all together, may lose before drafting pauses
MIN_LOSS = 0.25  # each paused request halves the limit of the next one, down to this
MAX_CREDIT = 2.0  # plain steps of gains that count against later losses
PAUSE = 64  # tokens without drafts; doubled by each further pause of a request
CUT = 512  # tokens of all requests for which drafts stay short; doubled by each further time
READ_CREDIT = 16.0  # plain steps for reading prompts, which gains fill again
FREE_TIME = 0.01  # plain steps: the time that `propose` may take for all sequences of a step
TRIAL_RATE = 0.005  # share of the time that a drafter without proof may lose
TRIAL_COST = 0.15  # plain steps that a first draft takes beside its row
PROOF = 3.0  # plain steps gained, after all losses between, by which a drafter is proved

log = logging.getLogger(__name__)


class _Account:
    """The time that drafting gained for one request, in plain steps."""

    __slots__ = ("balance", "due", "earned_to", "max_loss", "pause", "resume_at")

    def __init__(self, max_loss: float, length: int) -> None:
        self.balance = 0.0
        self.due = 0.0  # gain that a draft began with, which is negative, until its outcome is known
        self.earned_to = length  # the tokens before this have earned what a trial may lose
        self.max_loss = max_loss
        self.pause = PAUSE
        self.resume_at = 0  # sequence length at which drafting resumes

    def take_due(self) -> float:
        """Return what is due, which is nothing from now on."""
        due, self.due = self.due, 0.0
        return due

    def rest(self, length: int) -> None:
        """Pause drafting behind so many tokens."""
        self.balance = 0.0
        self.resume_at = length + self.pause
        self.pause *= 2


class _Trial:
    """The time that a drafter without proof may lose in all requests together, and what it has gained."""

    __slots__ = ("balance", "gained")

    def __init__(self) -> None:
        self.balance = 0.0  # plain steps, between -MAX_LOSS and MAX_CREDIT
        self.gained = 0.0  # plain steps, since losses ate up the gains before

    def add(self, gain: float) -> bool:
        """Add to the balance, and tell whether the drafter is proved."""
        self.balance = max(self.balance + gain, -MAX_LOSS)
        self.gained = max(self.gained + gain, 0.0)
        return self.gained >= PROOF


class ThrottledDrafter:
    """A `Drafter` around another one. Each request has its own account; `max_draft` bounds the length of a draft.

    A longer step delays every request in it. Where all together have lost what one may lose, each that has not gained
    pauses: else so many requests would lose so many times as much.

    `name` is what a request may choose it by, and what those who watch see.

    `read_s` returns the seconds that the drafter has spent on texts before it could draft. A credit pays for that time
    as long as drafts gain it back; without one, a long prompt would make a request pause before its first draft.

    `proof` is a file that exists once the drafter has gained time with this model on this machine. Until then it is on
    trial, except for requests that choose it: answers earn the time for drafts of one token, so that one that is never
    right costs TRIAL_RATE. Without `proof`, it counts as proved.

    A single step with a long draft can lose more than an account may. While nothing is accepted, each pause after such
    a step halves the drafts of all requests. The first accepted token lifts that limit, or CUT tokens do: where one row
    alone does not pay, no draft is short enough to be accepted, and the step may have been slow for another reason.
    """

    def __init__(
        self,
        drafter: Drafter,
        clock: StepClock,
        max_draft: int | None = None,
        name: str = "ngram",
        proof: Path | None = None,
        read_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._drafter = drafter
        self._read_s = read_s
        self._name = name
        self._clock = clock
        self._max_draft = max_draft
        self._accounts: WeakKeyDictionary[Sequence, _Account] = WeakKeyDictionary()
        self._balance = 0.0  # of all requests together
        self._due = 0.0  # gain that the drafts of the next step began with
        self._due_at = 0  # number of the step before it
        self._read_credit = READ_CREDIT
        self._max_loss = MAX_LOSS  # of the next request
        self._cut_len: int | None = None  # limit of drafts while nothing is accepted
        self._cut_for = CUT  # tokens that the next limit lasts
        self._cut_left = 0  # tokens that this one lasts
        self._accepted = False  # whether a token was accepted since the last pause
        self._proof = proof
        self._trial = _Trial() if proof and not os.path.exists(proof) else None  # noqa: PTH110 - raises nothing

    def begin(self, seq: Sequence) -> None:
        self._accounts[seq] = _Account(self._max_loss, len(seq.tokens))
        self._drafter.begin(seq)

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        account = self._accounts[seq]
        if self._cut_len:
            self._cut_left -= 1
            if not self._cut_left:
                self._cut_len = None
                self._cut_for *= 2
        if account.due:  # of a draft that no step verified
            self._add(seq, account.take_due())
        if len(seq.tokens) < account.resume_at or self._clock.plain_due or not self._may_draft(seq, marginal_cost):
            return []
        if self._due_at != self._clock.num_steps:
            self._due, self._due_at = 0.0, self._clock.num_steps
        if self._due + max(self._balance, 0.0) < -account.max_loss:  # all wait for the drafts of others in this step
            return []
        start, read_s = time.perf_counter(), self._read_s()
        draft = self._drafter.propose(seq, marginal_cost[: self._limit(seq)], forced)
        if token_s := self._clock.token_s():
            free = 0.0 if self._on_trial(seq) else FREE_TIME
            lost = (time.perf_counter() - start) / token_s  # tokens
            due = min(free - lost, 0.0) / self._clock.sequences
            self._due += due
            read = min((self._read_s() - read_s) / token_s / self._clock.sequences, self._read_credit, -due)
            self._read_credit -= read
            account.due = due + read
        if draft:
            seq.drafted_by = self._name
        elif account.due:
            self._add(seq, account.take_due())
        return draft

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        """Return the drafter's own cost; 0 while it is paused.

        Its time is not counted, because the device computes meanwhile. If a plain step is due, it is the running one.
        """
        if len(seq.tokens) + 1 < self._accounts[seq].resume_at or not self._may_draft(seq, marginal_cost):
            return 0.0
        return self._drafter.missed_draft_cost(seq, marginal_cost[: self._limit(seq)])

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._drafter.observe(seq, drafted, accepted)
        if accepted:
            self._cut_len, self._cut_for, self._accepted = None, CUT, True
        due = self._accounts[seq].take_due()
        step = self._clock.last
        if step is None or step.rows <= step.sequences or not step.plain_s:
            if step and not step.plain_s and 2 * accepted < drafted:
                self._clock.plain_due = True  # measure a plain step before more such drafts are made
            self._add(seq, min(due + accepted / self._clock.sequences, 0.0))  # what the rows took is not known
            return
        share = drafted / (step.rows - step.sequences)
        gain = accepted / step.sequences - share * (step.seconds / step.plain_s - 1)
        self._read_credit = min(max(self._read_credit + gain + due, 0.0), READ_CREDIT)
        if self._add(seq, max(gain, -MAX_LOSS) + due):  # a stalled step is not its draft's fault
            if gain < -MAX_LOSS and not self._accepted:
                self._cut_len, self._cut_left = max(drafted // 2, 1), self._cut_for
            self._accepted = False

    def _add(self, seq: Sequence, gain: float) -> bool:
        """Add to the account of a request, or of the trial; tell whether drafting pauses."""
        if self._trial and self._trial.add(gain):
            self._prove(True)
        account = self._accounts[seq]
        if self._on_trial(seq) or len(seq.tokens) < account.resume_at:  # others of its step made it rest
            return False
        before, account.balance = account.balance, min(account.balance + gain, MAX_CREDIT)
        self._balance += account.balance - before
        if account.balance >= 0 or min(account.balance, self._balance) >= -account.max_loss:
            return False
        if self._balance < -account.max_loss:
            losing = [other for other in self._accounts if self._loses(other)]
        else:
            losing = [seq]
        for other in losing:
            self._balance -= self._accounts[other].balance
            self._accounts[other].rest(len(other.tokens))
        return True

    def _loses(self, seq: Sequence) -> bool:
        """Tell whether a request drafts and has not gained by it."""
        if seq.params.draft not in (self._name, "auto") or self._on_trial(seq):
            return False
        account = self._accounts[seq]
        return account.balance <= 0 and len(seq.tokens) >= account.resume_at

    def _prove(self, proved: bool) -> None:
        """Begin or end the trial, and keep that for the next process."""
        assert self._proof
        self._trial = None if proved else _Trial()
        try:
            if proved:
                self._proof.parent.mkdir(parents=True, exist_ok=True)
                self._proof.touch()
            else:
                self._proof.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be changed, so %s begins again: %s", self._proof, self._name, error.strerror)

    def _may_draft(self, seq: Sequence, marginal_cost: Seq[float]) -> bool:
        """Tell whether a request lets this drafter draft (it may name one of ngram and mtp), and a trial lets it."""
        if seq.params.draft not in (self._name, "auto"):
            return False
        if not self._trial or not self._on_trial(seq):
            return True
        account = self._accounts[seq]
        steps = (len(seq.tokens) - account.earned_to) / len(self._accounts)  # each step is one token of every sequence
        self._trial.balance = min(self._trial.balance + TRIAL_RATE * steps, MAX_CREDIT)
        account.earned_to = len(seq.tokens)
        return not marginal_cost or self._trial.balance >= marginal_cost[0] + TRIAL_COST

    def _on_trial(self, seq: Sequence) -> bool:
        return self._trial is not None and seq.params.draft == "auto"

    def _limit(self, seq: Sequence) -> int | None:
        """Return the length of the longest draft; None: any."""
        limits = self._max_draft, self._cut_len, 1 if self._on_trial(seq) else None
        return min((limit for limit in limits if limit is not None), default=None)

    def end(self, seq: Sequence) -> None:
        account = self._accounts.pop(seq, None)
        if account:
            self._balance -= account.balance
            paused = account.resume_at > 0
            self._max_loss = max(account.max_loss / 2, MIN_LOSS) if paused else MAX_LOSS
            if self._proof and not self._trial and self._max_loss == MIN_LOSS:  # three requests in a row lost time
                self._prove(False)
        self._drafter.end(seq)

    def work(self, seconds: float) -> bool:
        return self._drafter.work(seconds)

    def close(self) -> None:
        self._drafter.close()


class ChainDrafter:
    """A `Drafter` over several: the first one with a draft proposes it, and observes its outcome."""

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._author: dict[int, Drafter] = {}  # of the last draft, by sequence

    def begin(self, seq: Sequence) -> None:
        for drafter in self._drafters:
            drafter.begin(seq)

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        for drafter in self._drafters:
            draft = drafter.propose(seq, marginal_cost, forced)
            if draft:
                self._author[seq.id] = drafter
                return draft
        return []

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        return max(drafter.missed_draft_cost(seq, marginal_cost) for drafter in self._drafters)

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self._author[seq.id].observe(seq, drafted, accepted)

    def end(self, seq: Sequence) -> None:
        self._author.pop(seq.id, None)
        for drafter in self._drafters:
            drafter.end(seq)

    def work(self, seconds: float) -> bool:
        pending = [drafter.work(seconds / len(self._drafters)) for drafter in self._drafters]  # each gets its share
        return any(pending)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
