"""ModelDrafter: drafts from a smaller model of the same vocabulary, on an executor of its own.

Owns the small model's cache, one slot for each sequence, and how far a draft goes. Knows nothing of the large model
but its tokens and the cost of a row.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from edgelm.core import NOT_A_TOKEN, Chunk, Executor, SamplingParams, Sequence, Step, Trim
from edgelm.engine.clock import MAX_STEP_S, MIN_PREFILL
from edgelm.engine.prefixes import common_prefix_len
from edgelm.errors import EngineError

BUCKETS = 10  # of the small model's confidence
PRIOR = 8.0  # drafts that each bucket's first estimate weighs as much as
DECAY = 0.98  # of a bucket's counts by each draft token that is verified
LEAST_HOPE = 0.02  # a draft ends where it is reached less often
SLOWEST_START = 0.25  # of a plain step: what a step of the small model is taken for until one was timed
RETRY_EVERY = 16  # steps, where drafting is not expected to pay
_WEIGHT = 0.2

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Follower:
    """A sequence of the small model that follows one of the large."""

    slot: int
    tokens: list[int] = field(default_factory=list)  # whose KV the slot holds
    confidences: list[float] = field(default_factory=list)  # of the draft that is being verified
    rate: float = 1.0  # tokens that a step of the large model yields
    skipped: int = 0


class ModelDrafter:
    """A `Drafter`. `step_s` says what a step of the large model takes now, in seconds; 0: not known.

    Takes the executor over: `close` frees it.
    """

    def __init__(self, executor: Executor, step_s: Callable[[], float]) -> None:
        self._executor = executor
        self._step_s = step_s
        self._free = list(range(executor.info.max_sequences))
        self._followers: dict[int, _Follower] = {}  # by the large model's sequence
        self._own = Sequence(0, [], 0, SamplingParams(temperature=0, num_logprobs=0))
        self._accepted = [PRIOR * (bucket + 0.5) / BUCKETS for bucket in range(BUCKETS)]
        self._verified = [PRIOR] * BUCKETS
        self._own_step_s = 0.0
        self._prefill_s = 0.0  # a token's

    def begin(self, seq: Sequence) -> None:
        if self._free:
            self._followers[seq.id] = _Follower(self._free.pop())

    def propose(self, seq: Sequence, marginal_cost: Seq[float]) -> list[int]:
        follower = self._followers.get(seq.id)
        length = len(seq.tokens) + len(marginal_cost)
        if follower is None or length > min(self._executor.info.context, self._room(follower)):
            return []
        if max(seq.tokens[len(follower.tokens) :], default=0) >= self._executor.info.num_vocab:
            return []  # the large model's vocabulary is padded further, or has tokens more
        own_cost = self._own_cost()
        if self._hope(1.0) <= (marginal_cost[0] + own_cost) * follower.rate and follower.skipped < RETRY_EVERY:
            follower.skipped += 1
            return []
        follower.skipped = 0
        try:
            if not self._catch_up(follower, seq.tokens):
                return []
            return self._draft(follower, seq.tokens, marginal_cost, own_cost)
        except EngineError as error:
            self._give_up(error)
            return []

    def stake(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        """Return more than any step saves: there is a draft after every token."""
        return math.inf

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        follower = self._followers.get(seq.id)
        if follower is None:
            return
        for place, confidence in enumerate(follower.confidences[: min(accepted + 1, drafted)]):
            bucket = _bucket(confidence)
            self._verified[bucket] = DECAY * self._verified[bucket] + 1
            self._accepted[bucket] = DECAY * self._accepted[bucket] + (place < accepted)
        follower.rate += _WEIGHT * (1 + accepted - follower.rate)
        follower.confidences = []

    def end(self, seq: Sequence) -> None:
        follower = self._followers.pop(seq.id, None)
        if follower is None:
            return
        self._free.append(follower.slot)
        try:
            self._trim(follower, 0)
        except EngineError as error:
            self._give_up(error)

    def work(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        self._executor.close()

    # -- the small model -------------------------------------------------------------------------------------------

    def _draft(self, follower: _Follower, tokens: list[int], marginal_cost: Seq[float], own_cost: float) -> list[int]:
        """Return the most likely continuation, as far as it is expected to pay."""
        draft: list[int] = []
        confidences: list[float] = []
        reached, yielded, spent = 1.0, 1.0, 1.0
        best_rate, best_len = 1.0, 0
        next_token = tokens[-1]
        for count, cost in enumerate(marginal_cost, 1):
            next_token, confidence = self._next(follower, next_token)
            if next_token == NOT_A_TOKEN:
                break
            draft.append(next_token)
            confidences.append(confidence)
            reached *= self._hope(confidence)
            yielded += reached
            spent += cost + own_cost
            if yielded / spent > best_rate:
                best_rate, best_len = yielded / spent, count
            if reached < LEAST_HOPE or reached * self._hope(1.0) < own_cost * follower.rate:
                break
        follower.confidences = confidences[:best_len]
        return draft[:best_len]

    def _next(self, follower: _Follower, token: int) -> tuple[int, float]:
        """Run one token; return the likeliest next one and its probability."""
        began = time.perf_counter()
        step = Step((Chunk(self._own, len(follower.tokens), [token], 1, follower.slot),))
        self._executor.forward(step)
        sampled = self._executor.sample(step, None).read()[0][0]
        follower.tokens.append(token)
        seconds = time.perf_counter() - began
        self._own_step_s += _WEIGHT * (seconds - self._own_step_s) if self._own_step_s else seconds
        return sampled.id, math.exp(sampled.logprob) if sampled.logprob is not None else 0.0

    def _catch_up(self, follower: _Follower, tokens: list[int]) -> bool:
        """Bring the cache to all tokens but the last, within the time of a step; False: it is not there yet."""
        common = common_prefix_len(follower.tokens, tokens[:-1])
        self._trim(follower, common)
        missing = len(tokens) - 1 - common
        room = int(MAX_STEP_S / self._prefill_s) if self._prefill_s else MIN_PREFILL
        end = common + min(missing, max(room, MIN_PREFILL))
        began = time.perf_counter()
        for start in range(common, end, self._executor.info.max_tokens):
            chunk = tokens[start : min(start + self._executor.info.max_tokens, end)]
            self._executor.forward(Step((Chunk(self._own, start, chunk, 0, follower.slot),)))
            follower.tokens += chunk
        if end - common >= MIN_PREFILL:
            self._prefill_s = (time.perf_counter() - began) / (end - common)
        return end == len(tokens) - 1

    def _room(self, follower: _Follower) -> int:
        """Return how many positions the others leave to one: its own cache may be the smaller one of the two models."""
        others = sum(len(each.tokens) for each in self._followers.values() if each is not follower)
        return self._executor.info.capacity - others

    def _trim(self, follower: _Follower, length: int) -> None:
        if len(follower.tokens) > length:
            self._executor.forward(Step((), (Trim(follower.slot, length),)))
            del follower.tokens[length:]

    def _give_up(self, error: EngineError) -> None:
        """Draft no more: an answer does not fail because its draft did."""
        log.warning("the draft model is not used any more: %s", error)
        self._followers, self._free = {}, []

    # -- what is expected ------------------------------------------------------------------------------------------

    def _own_cost(self) -> float:
        """Return what a step of the small model costs, in plain steps of the large."""
        step_s = self._step_s()
        return self._own_step_s / step_s if self._own_step_s and step_s else SLOWEST_START

    def _hope(self, confidence: float) -> float:
        """Return how often a token of that confidence was accepted."""
        bucket = _bucket(confidence)
        return self._accepted[bucket] / self._verified[bucket]


def _bucket(confidence: float) -> int:
    return min(int(confidence * BUCKETS), BUCKETS - 1)
