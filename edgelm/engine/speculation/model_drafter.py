"""ModelDrafter: drafts from a smaller model of the same vocabulary, on an executor of its own.

Owns the draft model's cache, one slot or block table for each sequence, and the length of a draft. Of the target model
it knows only the tokens and the cost of a row.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from edgelm.base.errors import EngineError
from edgelm.base.sampling import SamplingParams
from edgelm.engine.clock import MAX_STEP_S, MIN_PREFILL
from edgelm.engine.core import Chunk, Executor, Sequence, Step, Trim
from edgelm.engine.prefixes import common_prefix_len
from edgelm.engine.speculation.confidence import WEIGHT, Confidence, Draft

FIRST_STEP_COST = 0.25  # tokens that all lose meanwhile: the cost of a draft model's step before one was timed

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Mirror:
    """The draft model's copy of one sequence."""

    slot: int
    draft: Draft
    blocks: list[int] = field(default_factory=list)  # if the executor reads its cache through block tables
    tokens: list[int] = field(default_factory=list)  # whose KV is in the slot


class ModelDrafter:
    """A `Drafter`. `token_s` returns the seconds in which all sequences lose one token together; 0: not known.

    Takes over the executor: `close` frees it.
    """

    def __init__(self, executor: Executor, token_s: Callable[[], float]) -> None:
        self._executor = executor
        self._token_s = token_s
        self._free_slots = list(range(executor.info.max_sequences))
        self._block_len = executor.info.block_len
        self._free_blocks = list(range(executor.info.capacity // self._block_len)) if self._block_len else []
        self._mirrors: dict[int, _Mirror] = {}  # by the id of the target's sequence
        self._seq = Sequence(0, [], 0, SamplingParams(temperature=0, num_logprobs=0))  # of all our steps
        self._confidence = Confidence()
        self._step_s = 0.0
        self._prefill_s = 0.0  # per token
        self._read_s = 0.0

    def read_s(self) -> float:
        """Return the seconds that the texts before drafts have taken so far."""
        return self._read_s

    def begin(self, seq: Sequence) -> None:
        if self._free_slots and not seq.pictures:  # the draft model does not see them
            self._mirrors[seq.id] = _Mirror(self._free_slots.pop(), Draft(len(seq.tokens)))

    def propose(self, seq: Sequence, marginal_cost: Seq[float], forced: Seq[int] = ()) -> list[int]:
        mirror = self._mirrors.get(seq.id)
        tokens = [*seq.tokens, *forced] if forced else seq.tokens
        max_len = len(tokens) + len(marginal_cost)
        if mirror is None or max_len > min(self._executor.info.context, self._room(mirror)):
            return []
        if max(tokens[len(mirror.tokens) :], default=0) >= self._executor.info.num_vocab:
            return []  # the target's vocabulary has more padding, or more tokens
        step_cost = self._step_cost()
        if not self._confidence.may_pay(mirror.draft, len(seq.tokens), marginal_cost[0], step_cost):
            return []
        is_due = self._confidence.is_due(mirror.draft, len(seq.tokens))
        mirror.draft.last_try = len(seq.tokens)
        try:
            if not self._catch_up(mirror, tokens):
                return []
            return self._confidence.propose(
                mirror.draft, self._continuation(mirror, tokens[-1]), marginal_cost, step_cost, is_due
            )
        except EngineError as error:
            self._disable(error)
            return []

    def missed_draft_cost(self, seq: Sequence, marginal_cost: Seq[float]) -> float:
        """Return more than any step saves, because there is a draft after every token; 0 where there is none."""
        mirror, length = self._mirrors.get(seq.id), len(seq.tokens) + 1
        if mirror is None or not self._confidence.may_pay(mirror.draft, length, marginal_cost[0], self._step_cost()):
            return 0.0
        return math.inf

    def observe(self, seq: Sequence, drafted: int, accepted: int) -> None:
        if mirror := self._mirrors.get(seq.id):
            self._confidence.observe(mirror.draft, drafted, accepted)

    def end(self, seq: Sequence) -> None:
        mirror = self._mirrors.pop(seq.id, None)
        if mirror is None:
            return
        self._free_slots.append(mirror.slot)
        try:
            self._trim(mirror, 0)
        except EngineError as error:
            self._disable(error)

    def work(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        self._executor.close()

    # -- the draft model -------------------------------------------------------------------------------------------

    def _continuation(self, mirror: _Mirror, token: int) -> Callable[[], tuple[int, float]]:
        """Return a function that returns the next token and its probability at each call."""

        def next_token() -> tuple[int, float]:
            nonlocal token
            token, probability = self._next(mirror, token)
            return token, probability

        return next_token

    def _next(self, mirror: _Mirror, token: int) -> tuple[int, float]:
        """Run one token; return the most likely next one and its probability."""
        start = time.perf_counter()
        length = len(mirror.tokens)
        step = Step((Chunk(self._seq, length, [token], 1, self._kv_location(mirror, length + 1)),))
        self._executor.forward(step)
        sampled = self._executor.sample(step, None).read()[0][0]
        mirror.tokens.append(token)
        seconds = time.perf_counter() - start
        self._step_s += WEIGHT * (seconds - self._step_s) if self._step_s else seconds
        return sampled.id, math.exp(sampled.logprob) if sampled.logprob is not None else 0.0

    def _catch_up(self, mirror: _Mirror, tokens: list[int]) -> bool:
        """Compute the KV of all tokens but the last, within the time limit of a step; False: some are missing."""
        common = common_prefix_len(mirror.tokens, tokens[:-1])
        self._trim(mirror, common)
        missing = len(tokens) - 1 - common
        room = int(MAX_STEP_S / self._prefill_s) if self._prefill_s else MIN_PREFILL
        end = common + min(missing, max(room, MIN_PREFILL))
        start_s = time.perf_counter()
        for start in range(common, end, self._executor.info.max_tokens):
            chunk = tokens[start : min(start + self._executor.info.max_tokens, end)]
            location = self._kv_location(mirror, start + len(chunk))
            self._executor.forward(Step((Chunk(self._seq, start, chunk, 0, location),)))
            mirror.tokens += chunk
        seconds = time.perf_counter() - start_s
        if end - common >= MIN_PREFILL:
            self._prefill_s = seconds / (end - common)
            self._read_s += seconds
        return end == len(tokens) - 1

    def _room(self, mirror: _Mirror) -> int:
        """Return the positions that the other sequences leave: this cache may be smaller than the target's."""
        if self._block_len:
            return self._block_len * (len(self._free_blocks) + len(mirror.blocks))
        others = sum(len(other.tokens) for other in self._mirrors.values() if other is not mirror)
        return self._executor.info.capacity - others

    def _kv_location(self, mirror: _Mirror, length: int) -> tuple[int, ...] | int:
        """Return where the KV of a sequence is, with room for positions up to `length`."""
        if not self._block_len:
            return mirror.slot
        while self._block_len * len(mirror.blocks) < length:
            mirror.blocks.append(self._free_blocks.pop())
        return tuple(mirror.blocks)

    def _trim(self, mirror: _Mirror, length: int) -> None:
        if len(mirror.tokens) > length:
            if not self._block_len:
                self._executor.forward(Step((), (Trim(mirror.slot, length),)))
            del mirror.tokens[length:]
        while mirror.blocks and self._block_len * (len(mirror.blocks) - 1) >= length:
            self._free_blocks.append(mirror.blocks.pop())

    def _disable(self, error: EngineError) -> None:
        """Stop drafting for good: an answer must not fail because its draft did."""
        log.warning("the draft model is not used any more: %s", error)
        self._mirrors, self._free_slots = {}, []

    # -- estimates -------------------------------------------------------------------------------------------------

    def _step_cost(self) -> float:
        """Return the tokens that all sequences lose while the draft model computes one."""
        token_s = self._token_s()
        return self._step_s / token_s if self._step_s and token_s else FIRST_STEP_COST
