"""How long a draft pays, where its tokens come with probabilities and each costs a step of its own.

Owns the share of accepted tokens by the drafter's confidence, and the decision to go on. Knows nothing of what drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from edgelm.engine.core import NOT_A_TOKEN

NUM_BUCKETS = 10  # of the confidence
PRIOR = 8.0  # draft tokens that the prior of a bucket counts as
DECAY = 0.98  # of a bucket's counts, per verified draft token
MIN_REACH = 0.02  # a draft ends before tokens that are reached less often
RETRY_EVERY = 16  # tokens without a draft, while drafting is not expected to pay
FIRST_DUE, MAX_DUE = 16, 64  # retries in which no draft is expected to pay, before one is verified nevertheless
WEIGHT = 0.2  # of the newest observation in an average
USUAL_WEIGHT = 0.05  # the same for the average over all sequences


class Draft:
    """The state of one sequence's drafts."""

    __slots__ = ("confidences", "last_try", "rate", "spent")

    def __init__(self, length: int) -> None:
        self.confidences: list[float] = []  # of the draft that is being verified
        self.rate = 1.0  # tokens in the time of a plain step
        self.spent = 1.0  # plain steps that the last draft and its verification take
        self.last_try = length  # length of the sequence, when it began or was last drafted for


class Confidence:
    """The acceptance of tokens by their confidence, over all sequences."""

    def __init__(self) -> None:
        self._accepted = [PRIOR * (bucket + 0.5) / NUM_BUCKETS for bucket in range(NUM_BUCKETS)]
        self._verified = [PRIOR] * NUM_BUCKETS
        self._due = 0  # retries in which no draft was expected to pay
        self._next_due = FIRST_DUE  # of them, before one is verified; each doubles it, and an accepted one makes it 1
        self._usual = self._acceptance(1.0)  # acceptance of a token before its confidence is known

    def may_pay(self, draft: Draft, length: int, row_cost: float, step_cost: float) -> bool:
        """Tell whether a draft behind so many tokens is worth its first step, or one is due again.

        The costs are in plain steps of a request alone: among others, in tokens that all lose together.
        """
        return self.is_due(draft, length) or self._usual > (row_cost + step_cost) * draft.rate

    def is_due(self, draft: Draft, length: int) -> bool:
        """Tell whether the last try is so long ago that what was learnt may be wrong by now."""
        return length - draft.last_try > RETRY_EVERY

    def propose(
        self,
        draft: Draft,
        next_token: Callable[[], tuple[int, float]],
        marginal_cost: Seq[float],
        step_cost: float,
        is_due: bool = False,
    ) -> list[int]:
        """Return the most likely continuation, with the length of the best expected rate.

        Each call of `next_token` returns the token behind the last one, and its confidence. Only verified tokens teach:
        of the tries that were due and are not expected to pay, some return one token.
        """
        tokens: list[int] = []
        confidences: list[float] = []
        reach, num_tokens, spent = 1.0, 1.0, 1.0  # the last two: expected tokens, and their cost in steps
        best_rate, best_len = 1.0, 0
        for length, cost in enumerate(marginal_cost, 1):
            token, confidence = next_token()
            if token == NOT_A_TOKEN:
                break
            tokens.append(token)
            confidences.append(confidence)
            acceptance = self._acceptance(confidence)
            self._usual += USUAL_WEIGHT * (acceptance - self._usual)
            reach *= acceptance
            num_tokens += reach
            spent += cost + step_cost
            if num_tokens / spent > best_rate:
                best_rate, best_len = num_tokens / spent, length
            if reach < MIN_REACH or reach * self._usual < step_cost * draft.rate:
                break
        if is_due and tokens and not best_len:
            self._due += 1
            if self._due >= self._next_due:
                self._due, self._next_due, best_len = 0, min(2 * self._next_due, MAX_DUE), 1
        draft.confidences = confidences[:best_len]
        draft.spent = 1.0 + sum(marginal_cost[:best_len]) + step_cost * len(tokens)
        return tokens[:best_len]

    def observe(self, draft: Draft, drafted: int, accepted: int) -> None:
        """Learn from a draft that was verified."""
        if accepted:
            self._next_due = 1
        for place, confidence in enumerate(draft.confidences[: min(accepted + 1, drafted)]):
            bucket = _bucket(confidence)
            self._verified[bucket] = DECAY * self._verified[bucket] + 1
            self._accepted[bucket] = DECAY * self._accepted[bucket] + (place < accepted)
        rate = draft.rate + WEIGHT * ((1 + accepted) / draft.spent - draft.rate)
        draft.rate = max(rate, 1.0)  # as without drafts
        draft.confidences = []

    def _acceptance(self, confidence: float) -> float:
        """Return the share of accepted tokens among those of this confidence."""
        bucket = _bucket(confidence)
        return self._accepted[bucket] / self._verified[bucket]


def _bucket(confidence: float) -> int:
    return min(int(confidence * NUM_BUCKETS), NUM_BUCKETS - 1)
