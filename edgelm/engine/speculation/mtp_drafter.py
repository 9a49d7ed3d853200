"""MtpDrafter: drafts from the heads of a model that predict several tokens (multi-token prediction).

Owns the length of a draft. The heads read the hidden states of the model's own executor, so there is nothing of the
prompt to compute beforehand, and no second cache to keep.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from edgelm.base.errors import EngineError, OutOfMemoryError
from edgelm.engine.core import Heads, Sequence
from edgelm.engine.speculation.confidence import WEIGHT, Confidence, Draft

FIRST_STEP_COST = 0.15  # tokens that all lose meanwhile: the cost of the heads before they were timed
FIRST_REST, LONGEST_REST = 16, 1024  # tokens without heads behind the second lack of memory in a row, doubled by each

log = logging.getLogger(__name__)


class MtpDrafter:
    """A `Drafter`. `token_s` returns the seconds in which all sequences lose one token together; 0: not known."""

    def __init__(self, heads: Heads, token_s: Callable[[], float]) -> None:
        self._heads: Heads | None = heads
        self._token_s = token_s
        self._confidence = Confidence()
        self._drafts: dict[int, Draft] = {}  # by sequence
        self._timed: set[int] = set()  # sequences whose end of the prompt the heads have read
        self._step_s = 0.0
        self._rest, self._next_rest = 0, 0  # tokens until the heads try again, now and after the next lack of memory
        self._lacked_memory = False  # in some step: this is logged once

    def begin(self, seq: Sequence) -> None:
        if self._heads and seq.params.draft in ("auto", "mtp"):
            self._drafts[seq.id] = Draft(len(seq.tokens))
            self._heads.begin(seq.id)

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        draft, heads = self._drafts.get(seq.id), self._heads
        if draft is None or heads is None or forced or self._rests():  # behind forced tokens no hidden state is known
            return []
        step_cost = self._step_cost()
        if not self._confidence.may_pay(draft, len(seq.tokens), marginal_cost[0], step_cost):
            return []
        is_due = self._confidence.is_due(draft, len(seq.tokens))
        draft.last_try = len(seq.tokens)
        token: int | None = None

        def next_token() -> tuple[int, float]:
            nonlocal token
            began = time.perf_counter()
            token, probability = heads.first(seq.id, seq.tokens) if token is None else heads.next(seq.id, token)
            seconds = time.perf_counter() - began
            if seq.id in self._timed:
                self._step_s += WEIGHT * (seconds - self._step_s) if self._step_s else seconds
            self._timed.add(seq.id)
            return token, probability

        try:
            proposed = self._confidence.propose(draft, next_token, marginal_cost, step_cost, is_due)
            if token is not None:
                self._next_rest = 0
            return proposed
        except OutOfMemoryError as error:  # there may be room in the next step
            if not self._lacked_memory:
                log.warning("the heads did not draft: %s", error)
            self._lacked_memory = True
            self._rest, self._next_rest = self._next_rest, min(max(2 * self._next_rest, FIRST_REST), LONGEST_REST)
        except EngineError as error:
            log.warning("the heads are not used any more: %s", error)  # an answer must not fail because its draft did
            for seq_id in self._drafts:
                heads.end(seq_id)
            self._heads, self._drafts = None, {}
        return []

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        """Return more than any step saves, because there is a draft after every token; 0 where there is none."""
        draft, length = self._drafts.get(seq.id), len(seq.tokens) + 1
        if draft is None or self._rests():
            return 0.0
        if not self._confidence.may_pay(draft, length, marginal_cost[0], self._step_cost()):
            return 0.0
        return math.inf

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        if draft := self._drafts.get(seq.id):
            self._confidence.observe(draft, drafted, accepted)

    def end(self, seq: Sequence) -> None:
        self._drafts.pop(seq.id, None)
        self._timed.discard(seq.id)
        if self._heads:
            self._heads.end(seq.id)

    def work(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the executor closes the heads."""

    def _rests(self) -> bool:
        """Count a token, and tell whether the heads rest: steps run ahead meanwhile."""
        self._rest = max(self._rest - 1, 0)
        return self._rest > 0

    def _step_cost(self) -> float:
        """Return the tokens that all sequences lose while the heads compute one."""
        token_s = self._token_s()
        return self._step_s / token_s if self._step_s and token_s else FIRST_STEP_COST
